"""Layers of experts (mixture of experts) for `pipeloom.models.GPT` and other models.

layer                  `Experts`: router, experts, shared experts
routers                one class per router
routing                `Routing`, and how tokens are sent and results combined
transformers_experts   `take_over`: experts of Hugging Face models
settings               defaults of the routers; no torch

Names that need torch are imported lazily.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.models.experts.settings import ROUTERS, ExpertSettings

if TYPE_CHECKING:
    from pipeloom.models.experts.layer import Experts
    from pipeloom.models.experts.routing import Routing, dispatch_here
    from pipeloom.models.experts.transformers_experts import take_over

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.models.experts.layer": "Experts",
    "pipeloom.models.experts.routing": "Routing dispatch_here",
    "pipeloom.models.experts.transformers_experts": "take_over",
}

__all__ = ["ROUTERS", "ExpertSettings", "Experts", "Routing", "dispatch_here", "take_over"]

__getattr__ = lazy_exports(__name__, _LAZY)
