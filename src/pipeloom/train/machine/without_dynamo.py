"""`without_dynamo`: torch's optimizers in a process that compiles nothing, without loading torch._dynamo.

torch.optim tells torch.compile which of its functions not to compile. For that, the first optimizer of a process loads
torch._dynamo, which takes about as long as torch itself.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from pipeloom.training.losses.sample_halves import RefusingEffects

_DISABLED = (
    *((Optimizer, name) for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict")),
    (RefusingEffects, "__torch_dispatch__"),
)
_CACHE = "__dynamo_disable"  # attribute of a function: what torch._disable_dynamo found for it
_STEP = "_use_grad"  # what torch names the function around an optimizer's step


def without_dynamo() -> None:
    """From now on, optimizers run their functions without torch._dynamo, which would only mark them.

    Where it is loaded already, nothing changes. A release of torch with other functions loads it as before.
    """
    if "torch._dynamo" in sys.modules:
        return
    for owner, name in _DISABLED:
        if (function := getattr(getattr(owner, name, None), "__wrapped__", None)) is not None:
            setattr(function, _CACHE, function)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step: Any = vars(kind).get("step")
            if step is not None and step.__code__.co_name == _STEP:
                kind.step = _with_gradients_of(step.__wrapped__)  # type: ignore[method-assign]


def _with_gradients_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that records gradients where its optimizer is differentiable, as `_use_grad` does."""

    @functools.wraps(step)
    def steps(self: Optimizer, *arguments: Any, **more: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *arguments, **more)

    return steps
