"""A small GPT for examples, tests and `pipeloom train`. Names that need torch are imported lazily."""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from pipeloom.models.gpt import GPT, loss_fn
    from pipeloom.models.initialization import init_parameters, materialize
    from pipeloom.models.label_mean import mean_over_labels

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.models.gpt": "GPT loss_fn",
    "pipeloom.models.initialization": "init_parameters materialize",
    "pipeloom.models.label_mean": "mean_over_labels",
}

__all__ = ["GPT", "GPTConfig", "init_parameters", "loss_fn", "materialize", "mean_over_labels"]

__getattr__ = lazy_exports(__name__, _LAZY)
