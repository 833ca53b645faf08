"""`TracedModes`: notices that modules of a traced model got other modes or rates of dropout, which its trace keeps."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pipeloom.split.traced.stage import TracedStage


class TracedModes:
    """The modes of a model's modules when its pipeline was made.

    Args:
        model: the uncut model.
        stages: those of this process; of a model that is not traced, nothing is noticed.
    """

    def __init__(self, model: Any, stages: Iterable[nn.Module]) -> None:
        self._stages = [stage for stage in stages if isinstance(stage, TracedStage)]
        named = model.named_modules() if self._stages and isinstance(model, nn.Module) else ()
        self._before = [(weakref.ref(module), name, module.training, _rate(module)) for name, module in named]

    def check(self) -> None:
        """Warn once about a module whose mode or rate has changed, and is not that of the stages."""
        training = any(stage.training for stage in self._stages)
        for reference, name, mode, rate in self._before:
            module = reference()
            if module is None:
                continue
            is_other = module.training not in (mode, training)
            if is_other or _rate(module) != rate:
                seen = f"training={module.training}" if is_other else f"p={_rate(module)}"
                which = f"module {name!r} of the model" if name else "the model"
                warnings.warn(
                    f"{which} got {seen} after the pipeline was made, which has no effect: a traced model keeps "
                    "modes and rates of its modules. Call pipe.train() or pipe.eval(); change single "
                    "modules before the Pipeline is made.",
                    stacklevel=4,
                )
                self._before = []
                return


def _rate(module: nn.Module) -> float | None:
    return module.p if isinstance(module, _DropoutNd) else None
