"""`Reductions`: the calls of losses of torch.nn.functional in a forward, and those of which a loss is made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SCALING = frozenset({"Mul", "Div", "Mean"})
_LINEAR = _SCALING | {"Add", "Sub", "Sum", "Stack", "Neg", "ToCopy", "Alias", "Clone", "View", "Squeeze", "Unsqueeze"}
SCALED_SUM = "a sum with a factor"  # which may be the mean over what the factor counts
_OF_CLASSES = frozenset({"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})


class Reduction(NamedTuple):
    """A call of a loss that returned one number.

    Attributes:
        name: of the function.
        is_sum: whether it added up its terms; else it took their mean.
        is_weighted: whether the mean is weighted.
        target: classes, or what else the output is compared with.
        ignored: the class that does not count; None: the function has none.
        result: what it returned.
    """

    name: str
    is_sum: bool
    is_weighted: bool
    target: Any
    ignored: int | None
    result: Tensor

    def classes(self) -> Tensor | None:
        """The classes of its target; None: it has none."""
        target = self.target if self.ignored is not None else None
        return None if not isinstance(target, Tensor) or target.is_floating_point() else target


class Reductions(TorchFunctionMode):
    """Notices, while it is entered, the calls of losses that return one number; `found` has them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Reduction] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        names = _FUNCTIONS.get(func)
        if names is None and isinstance(func, torch._ops.OpOverload):
            names = tuple(each.name for each in func._schema.arguments)
        if names is not None and "reduction" in names and isinstance(result, Tensor) and not result.dim():
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.found.append(_reduction(func, names, given, result))
        return result

    def terms(self, loss: Tensor) -> tuple[list[Reduction], str | None]:
        """The calls of which a loss is the sum, with any factors.

        Returns:
            The calls, and what else the loss is made of, in words; None: of nothing else.
        """
        if loss.grad_fn is None:
            same = [each for each in self.found if each.result.to(loss.dtype).allclose(loss, equal_nan=True)]
            return same[-1:], None if same else "other functions"
        nodes = {each.result.grad_fn: each for each in self.found if each.result.grad_fn is not None}
        terms: dict[int, Reduction] = {}
        foreign, scaled = False, False
        todo: list[Any] = [loss.grad_fn]
        while todo:
            node = todo.pop()
            kind = node.name().rstrip("0123456789").removesuffix("Backward")
            if node in nodes:
                terms[id(node)] = nodes[node]
            elif kind in _LINEAR:
                scaled |= kind in _SCALING
                todo += [each for each, _ in node.next_functions if each is not None]
            else:
                foreign = True
        if foreign:
            return list(terms.values()), "other functions"
        divided = scaled and any(each.is_sum for each in terms.values())
        return list(terms.values()), SCALED_SUM if divided else None


def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


# The losses of torch.nn.functional, with the names of their arguments.
_FUNCTIONS: Mapping[Any, Sequence[str]] = {
    function: _names_of(function)
    for function in vars(F).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
}


def _reduction(func: Any, names: Sequence[str], given: Mapping[str, Any], result: Tensor) -> Reduction:
    name = func._schema.name.removeprefix("aten::") if isinstance(func, torch._ops.OpOverload) else func.__name__
    ignored = given.get("ignore_index", -100) if name in _OF_CLASSES else None
    is_sum = given.get("reduction", "mean") in ("sum", 2) or given.get("size_average") is False
    is_weighted = given.get("weight") is not None and not name.startswith("binary")
    target = given.get("target", given.get("targets"))
    return Reduction(name, is_sum, is_weighted, target, ignored, result)
