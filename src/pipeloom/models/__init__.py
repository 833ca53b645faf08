"""A small GPT for examples, tests and `pipeloom train`. Names that need torch are imported lazily."""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from pipeloom.models.gpt import GPT, init_parameters, loss_fn, materialize

# Public name -> the module that defines it.
_HOMES = {
    "GPT": "pipeloom.models.gpt",
    "init_parameters": "pipeloom.models.gpt",
    "loss_fn": "pipeloom.models.gpt",
    "materialize": "pipeloom.models.gpt",
}

__all__ = ["GPT", "GPTConfig", "init_parameters", "loss_fn", "materialize"]

__getattr__ = lazy_exports(__name__, _HOMES)
