"""`Reductions`: calls of losses of torch.nn.functional, means and divisions in a forward; of which a loss is made."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SCALING = frozenset({"Mul", "Div", "Mean"})
LINEAR = _SCALING | {"Add", "Sub", "Sum", "Stack", "Neg", "ToCopy", "Alias", "Clone", "View", "Squeeze", "Unsqueeze"}
_PASSING = frozenset({"Where", "NanToNum", "Clamp", "ClampMin", "ClampMax"})  # numbers that stay as they are
SCALED_SUM = "a sum with a factor"  # which may be the mean over what the factor counts
_OF_ELEMENTS = frozenset(
    {
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "poisson_nll_loss",
        "soft_margin_loss",
    }
)
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
        number: of elements over which it took a mean, 1 for a sum; None: not known.
    """

    name: str
    is_sum: bool
    is_weighted: bool
    target: Any
    ignored: int | None
    result: Tensor
    number: Tensor | float | None

    def classes(self) -> Tensor | None:
        """The classes of its target; None: it has none."""
        target = self.target if self.ignored is not None else None
        return None if not isinstance(target, Tensor) or target.is_floating_point() else target


class Divisor(NamedTuple):
    """A mean, or a multiplication or division by a number, in a forward.

    Attributes:
        kind: "mean", "division" or "product".
        number: by what the sum of its elements is divided.
    """

    kind: str
    number: Tensor | float


class Reductions(TorchFunctionMode):
    """Notices, while it is entered, of what numbers are made.

    Attributes:
        found: the calls of losses that returned one number, in order.
        divisors: means, and multiplications and divisions by a number, by the node of the graph that they made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Reduction] = []
        self.divisors: dict[Any, Divisor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if torch.compiler.is_compiling() or not isinstance(result, Tensor):
            return result
        names, divides = _FUNCTIONS.get(func), _DIVISIONS.get(func)
        if names is None and isinstance(func, torch._ops.OpOverload):
            names, divides = tuple(each.name for each in func._schema.arguments), _DIVISIONS.get(func._schema.name)
        if names is not None and "reduction" in names and not result.dim():
            named = {**dict(zip(names, args, strict=False)), **given}
            self.found.append(_reduction(func, names, named, result))
        elif divides is not None and result.grad_fn is not None:
            divisor = divides(result, *args, **given)
            if divisor is not None:
                self.divisors[result.grad_fn] = divisor
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
            kind = kind_of(node)
            if node in nodes:
                terms[id(node)] = nodes[node]
            elif is_linear(node):
                scaled |= kind in _SCALING
                todo += [each for each, _ in node.next_functions if each is not None]
            else:
                foreign = True
        if foreign:
            return list(terms.values()), "other functions"
        divided = scaled and any(each.is_sum for each in terms.values())
        return list(terms.values()), SCALED_SUM if divided else None


def kind_of(node: Any) -> str:
    """What a node of a graph is the backward of, such as "Mul"."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def is_linear(node: Any) -> bool:
    """Whether a node of a graph passes on sums and means, or one number that it leaves as it is."""
    kind = kind_of(node)
    return kind in LINEAR or (kind in _PASSING and not node._input_metadata[0].shape)


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
    found = Reduction(name, is_sum, is_weighted, target, ignored, result, 1.0 if is_sum else None)
    return found if is_sum or is_weighted else found._replace(number=_num_elements(found, given))


def _num_elements(mean: Reduction, given: Mapping[str, Any]) -> Tensor | float | None:
    """Over how many elements a call took the mean; None: not known."""
    given_input, target = given.get("input", given.get("self")), mean.target
    if not isinstance(given_input, Tensor) or not isinstance(target, Tensor):
        return None
    if given.get("reduction") == "batchmean":
        return float(len(given_input))
    classes = mean.classes()
    if classes is not None:
        return classes.ne(-100 if mean.ignored is None else mean.ignored).sum()
    if mean.name in _OF_CLASSES:  # probabilities of classes
        return float(given_input.numel() // given_input.shape[1 if given_input.dim() > 1 else 0])
    if mean.name not in _OF_ELEMENTS:
        return None
    sizes = zip_longest(reversed(given_input.shape), reversed(target.shape), fillvalue=1)
    return float(math.prod(one if other == 1 else other for one, other in sizes))  # broadcast


def _mean(result: Tensor, given: Any = None, dim: Any = None, *_: Any, **named: Any) -> Divisor | None:
    """A mean over all elements, or along dimension 0."""
    given = named.get("input", given)
    if not isinstance(given, Tensor) or not given.numel():
        return None
    dims = (dim,) if isinstance(dim, int) else dim
    if result.dim() and not (dims and any(each in (0, -given.dim()) for each in dims)):
        return None
    return Divisor("mean", given.numel() / result.numel())


def _division(result: Tensor, given: Any = None, other: Any = None, **named: Any) -> Divisor | None:
    other = named.get("other", other)
    return Divisor("division", other) if _is_number(other, result) else None


def _product(result: Tensor, given: Any = None, other: Any = None, **named: Any) -> Divisor | None:
    for factor in (named.get("other", other), named.get("input", given)):
        if _is_number(factor, result):
            inverse = factor.reciprocal() if isinstance(factor, Tensor) else 1.0 / factor if factor else math.inf
            return Divisor("product", inverse)
    return None


def _is_number(value: Any, result: Tensor) -> bool:
    """Whether it is a number without a gradient; of results with dimensions, a tensor."""
    if isinstance(value, Tensor):
        return not value.dim() and not value.requires_grad and not value.is_complex()
    return not result.dim() and isinstance(value, int | float)


_DIVISIONS: Mapping[Any, Callable[..., Divisor | None]] = {
    function: divides
    for names, divides in (("mean", _mean), ("div divide true_divide", _division), ("mul multiply", _product))
    for name in names.split()
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"{name}_", None))
    if function is not None
} | {"aten::mean": _mean, "aten::div": _division, "aten::mul": _product}
