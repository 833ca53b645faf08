"""Splits an nn.Module into pipeline stages: finds its layers, chooses the cuts, tracks tied parameters."""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.split.chain_partition import Tie, partition

if TYPE_CHECKING:
    from pipeloom.split.layouts.layout import register_layout
    from pipeloom.split.profile import LayerTime, profile_layers
    from pipeloom.split.stage_module import StageModule
    from pipeloom.split.stages import Stages, TiedParameter, profile_model, split
    from pipeloom.split.traced.timing import profile_graph

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.split.layouts.layout": "register_layout",
    "pipeloom.split.profile": "LayerTime profile_layers",
    "pipeloom.split.stage_module": "StageModule",
    "pipeloom.split.stages": "Stages TiedParameter profile_model split",
    "pipeloom.split.traced.timing": "profile_graph",
}

__all__ = [
    "LayerTime",
    "StageModule",
    "Stages",
    "Tie",
    "TiedParameter",
    "partition",
    "profile_graph",
    "profile_layers",
    "profile_model",
    "register_layout",
    "split",
]

__getattr__ = lazy_exports(__name__, _LAZY)
