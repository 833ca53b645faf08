"""`means_of`: over how many elements a loss is a mean; `UnequalMeans`: whether that differs between micro-batches.

A loss that is linear in means and in sums that are divided is a sum of terms

    sum(elements) / (number * number * ...)

with the numbers on the way from the loss to the elements, such as `numel()` of a mean and the sum of a mask.
"""

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.training.losses.nonlinear import is_nonlinear
from pipeloom.training.losses.reductions import LINEAR, Divisor, Reduction, Reductions, is_linear, kind_of
from pipeloom.training.losses.sample_loops import LoopTerm, adds_up, sample_of

_SCALING = {"Mul", "Div", "Mean"}
_INSIDE = LINEAR - _SCALING  # what a sum over elements may pass
_TOLERANCE = 1e-5  # between numbers, relative
_UNIT = 2**20  # of numbers that replicas exchange


class Mean(NamedTuple):
    """A term of a loss.

    Attributes:
        name: of the function that took the mean, or "sum".
        number: by what the sum of its elements is divided.
        ignored: of a mean over labels the one that does not count; None: the elements are no labels.
    """

    name: str
    number: float
    ignored: int | None = None

    @property
    def divides(self) -> bool:
        """Whether it is more than a sum."""
        return self.name != "sum" or self.number != 1.0


class Loop(NamedTuple):
    """The terms of a loss that are of single samples.

    Attributes:
        adds: whether they are added up, rather than averaged; None: it is not known.
        results: what the calls among them returned, by id.
        is_all: whether the loss has no other terms.
    """

    adds: bool | None
    results: Set[int]
    is_all: bool


class Means(NamedTuple):
    """The terms of a loss, in an order that depends on the program alone.

    Attributes:
        terms: one for each call; of a loop over the samples, one for all of them.
        common: what all terms share: where the number of terms differs between micro-batches, this alone is compared.
        added: of a loss that is a sum of elements, which nothing divides, whether it adds up samples; else None.
        loop: None: no terms are seen to be of single samples.
        is_nonlinear: see the function of this name.
    """

    terms: tuple[Mean, ...]
    common: Mean
    added: bool | None = None
    loop: Loop | None = None
    is_nonlinear: bool = False


class _Path(NamedTuple):
    """The way from a loss to elements.

    Attributes:
        divisors: on the way.
        call: the loss function at its end.
        node: of the graph, where the elements are reduced.
        sample: of which they are; None: of several.
    """

    divisors: tuple[Divisor, ...]
    call: Reduction | None
    node: Any = None
    sample: int | None = None

    def number(self) -> float:
        own = 1.0 if self.call is None or self.call.number is None else float(self.call.number)
        return own * math.prod(map(_number_of, self.divisors))

    def term(self) -> LoopTerm:
        """As one of a loop over samples."""
        assert self.sample is not None
        numbers = [_number_of(each) for each in self.divisors]
        has_mean = self.divisors[-1].kind == "mean" if self.divisors else False
        if self.call is None:
            return LoopTerm(self.sample, math.prod(self.node._saved_self_sym_sizes), numbers, has_mean)
        has_mean = not self.call.is_sum
        target = self.call.target
        num_elements = target.numel() if isinstance(target, Tensor) else math.nan
        return LoopTerm(self.sample, num_elements, numbers + [float(self.call.number or 1.0)] * has_mean, has_mean)

    def mean(self) -> Mean:
        if self.call is not None:
            return Mean(self.call.name, self.number(), None if self.call.classes() is None else self.call.ignored)
        return Mean("mean" if any(each.kind == "mean" for each in self.divisors) else "sum", self.number())


def means_of(loss: Tensor, seen: Reductions, num_samples: int) -> Means:
    """The terms of a loss, as far as it is linear in them.

    Args:
        loss: without a graph, nothing is known.
        seen: of its forward.
        num_samples: of the micro-batch: as many calls of one function are those of its samples.
    """
    if loss.grad_fn is None:  # of an evaluation: not known
        return Means((), Mean("sum", 1.0))
    paths = [path for path in _paths(loss, seen, num_samples) if 0.0 < path.number() < math.inf]
    common = _Path(_common([path.divisors for path in paths]), None)
    names = {path.mean().name for path in paths}
    loops = len(paths) == num_samples and len(names) == 1
    if num_samples == 1 and loops:  # one call, in a loop where something divides by one sample
        (path,) = paths
        loops = len(path.divisors) + (path.call is not None) > 1 and float(path.divisors[0].number) == 1.0
        common = _Path(path.divisors[:1], None)
    loop, bends = _loop(paths, num_samples), is_nonlinear(loss, {each.result.grad_fn for each in seen.found})
    if loops or (loop is not None and loop.is_all):
        return Means((common.mean(),), common.mean(), None, loop, bends)
    terms = tuple(path.mean() for path in paths)
    is_plain = bool(terms) and all(path.call is None and not path.divisors for path in paths)
    return Means(terms, common.mean(), _adds_samples(loss, num_samples) if is_plain else None, loop, bends)


def _loop(paths: Sequence[_Path], num_samples: int) -> Loop | None:
    single = [path for path in paths if path.sample is not None]
    if not single:
        return None
    results = {id(path.call.result) for path in single if path.call is not None}
    return Loop(adds_up([path.term() for path in single], num_samples), results, len(single) == len(paths))


def _adds_samples(loss: Tensor, num_samples: int) -> bool:
    """Whether the elements that a loss adds up are those of all samples, by their shapes."""
    todo: list[Any] = [loss.grad_fn]
    shapes = []
    while todo:
        node = todo.pop()
        if kind_of(node) == "Sum":
            shapes.append(node._saved_self_sym_sizes)
        elif is_linear(node) and kind_of(node) not in _SCALING:
            todo += [each for each, _ in node.next_functions if each is not None]
    return bool(shapes) and all(shape and shape[0] == num_samples for shape in shapes)


def _paths(loss: Tensor, seen: Reductions, num_samples: int) -> list[_Path]:
    calls = {each.result.grad_fn: each for each in seen.found if each.result.grad_fn is not None}
    found: dict[tuple[int, ...], _Path] = {}
    todo: list[tuple[Any, tuple[Divisor, ...], Any]] = [(loss.grad_fn, (), None)]
    visited = set()
    while todo:
        node, divisors, inside = todo.pop()  # inside of the function that reduces the elements
        key = (node, *map(id, divisors), inside is None)
        if key in visited:
            continue
        visited.add(key)
        kind, divisor, call = kind_of(node), seen.divisors.get(node), calls.get(node)
        if call is not None:
            if call.number is not None:
                path = _Path(divisors, call, node, sample_of(node, num_samples))
                found[(*map(id, divisors), id(call))] = path
            continue
        if divisor is not None:
            divisors = (*divisors, divisor)
            inside = node if inside is None and divisor.kind == "mean" else inside
        elif kind not in _INSIDE if inside is not None else not is_linear(node):
            if inside is not None:  # the elements
                sample = sample_of(inside, num_samples)
                found[(*map(id, divisors), -1 if sample is None else sample)] = _Path(divisors, None, inside, sample)
            continue
        inside = node if inside is None and kind == "Sum" else inside
        followed = [each for each, _ in node.next_functions if each is not None]
        todo += [(each, divisors, inside) for each in reversed(followed)]
    return list(found.values())


def _number_of(divisor: Divisor) -> float:
    """Its number; 1 for a factor that counts nothing, such as a random weight."""
    number = float(divisor.number)
    if divisor.kind != "product" or not 0.0 < abs(number) < math.inf:
        return number
    return number if any(math.isclose(each, round(each), rel_tol=1e-4) for each in (number, 1.0 / number)) else 1.0


def _common(paths: Sequence[tuple[Divisor, ...]]) -> tuple[Divisor, ...]:
    """What all paths begin with."""
    found = []
    for divisors in zip(*paths, strict=False):
        if any(each is not divisors[0] for each in divisors):
            break
        found.append(divisors[0])
    return tuple(found)


class UnequalMeans:
    """Compares the losses of the micro-batches of one batch."""

    def __init__(self) -> None:
        self._first: tuple[Means, int, Sequence[float]] | None = None
        self._by = 0

    def elements(self) -> tuple[int, int]:
        """Of the first micro-batch of this batch: over how many elements its loss is a mean, and its weight.

        Both in units of 2^-20, and 0 where the loss is no single mean.
        """
        if self._first is None:
            return 0, 0
        means, _, weights = self._first
        term = means.terms[0] if len(means.terms) == 1 else means.common
        return (round(term.number * _UNIT), round(weights[self._by] * _UNIT)) if term.divides else (0, 0)

    def begin_batch(self) -> None:
        """Another batch begins, in which factors of losses may be others."""
        self._first = None

    def compare(self, means: Means, num_samples: int, weights: Sequence[float], by: int = 0) -> str | None:
        """What is a mean over other numbers of elements than in the first micro-batch, in words; None: nothing is.

        Args:
            means: of the loss of a micro-batch.
            num_samples: of the micro-batch.
            weights: of the micro-batch, by kind of weight.
            by: the kind with which losses are weighted.
        """
        if not weights[by]:
            return None
        if self._first is None or not self._first[2][by]:
            self._first, self._by = (means, num_samples, weights), by
            return None
        first, samples, others = self._first
        pairs = list(zip(first.terms, means.terms, strict=False))
        if len(first.terms) != len(means.terms):
            pairs = [(first.common, means.common)]
        for one, other in pairs:
            is_same = math.isclose(one.number, other.number, rel_tol=_TOLERANCE)
            is_even = math.isclose(one.number * weights[by], other.number * others[by], rel_tol=_TOLERANCE)
            if not is_same and not is_even:
                return _text(one, samples, other, num_samples)
        return None


def replicas_text(own: tuple[int, int], all_replicas: tuple[int, int], unit: str) -> str | None:
    """What is a mean over other numbers of elements than in other replicas, in words; None: nothing is.

    Args:
        own: `UnequalMeans.elements` of this replica.
        all_replicas: their sums.
        unit: by whose number losses are weighted, such as "sample".
    """
    number, others = own[0] / own[1], all_replicas[0] / all_replicas[1]
    if math.isclose(number, others, rel_tol=_TOLERANCE):
        return None
    return f"a mean (over {number:.6g} elements per {unit} in this replica, {others:.6g} in all)"


def _text(one: Mean, samples: int, other: Mean, other_samples: int) -> str:
    number, others, plural = f"{one.number:.6g}", f"{other.number:.6g}", "s" if samples != 1 else ""
    if one.name == "sum":
        numbers = f"divided by {number} for {samples} sample{plural}, by {others} for {other_samples}"
    else:
        over = "over" if one.name == "mean" else "mean over"
        numbers = f"{over} {number} elements of {samples} sample{plural}, {others} of {other_samples}"
    return f"a {one.name} ({numbers} in another micro-batch)"
