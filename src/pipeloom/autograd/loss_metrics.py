"""Metrics beside the loss: what a `loss_fn` may return in a dict, and how its values are combined.

A value is one micro-batch's (of slices, one slice's; of context-parallel ranks, one rank's tokens). Over a step,

    value                the mean, weighted as the loss is: by samples, of slices by tokens
    Mean(value, weight)  the sum of weight * value over the sum of the weights
    Sum(value)           the sum
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.errors import RunError, folded, listed

Number = Tensor | float | int | bool


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric of a `loss_fn` that is added up over micro-batches, slices and replicas, such as a count.

    Attributes:
        value: of one micro-batch: a real number or a tensor with one element.
    """

    value: Number


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric of a `loss_fn` that is averaged over micro-batches, slices and replicas with weights of its own.

    Attributes:
        value: of one micro-batch: a real number or a tensor with one element. Ignored where the weight is 0.
        weight: for example the number of labels over which the value is a mean: a number, or a tensor with one element.
    """

    value: Number
    weight: Number


class Metric(NamedTuple):
    """One metric of one micro-batch, without a graph; `weight` is None for a sum."""

    value: Tensor | float
    weight: Tensor | float | None

    def numbers(self) -> list[float]:
        """What is added up: 1, and the value; for a mean 1, weight * value and weight."""
        value = float(self.value)
        if self.weight is None:
            return [1.0, value]
        weight = float(self.weight)
        return [1.0, value * weight if weight else 0.0, weight]


def combined(numbers: list[float]) -> float | None:
    """The metric from sums of `Metric.numbers`: not a number for a mean of weight 0, None where nothing was added."""
    count, value, *weight = numbers
    if not count:
        return None
    if not weight:
        return value
    return value / weight[0] if weight[0] else math.nan


def separate(result: Any, weight: float) -> tuple[Any, dict[str, Metric]]:
    """The loss in what a `loss_fn` returned, and its metrics; plain values are means with this `weight`.

    Raises:
        RunError: a dict without "loss", or a metric that is not a real number.
    """
    if not isinstance(result, Mapping):
        return result, {}
    if "loss" not in result:
        raise RunError(
            f"loss_fn returned a dict with {listed(map(repr, result)) or 'no keys'}: the loss that is trained must be "
            "under 'loss'. Return {'loss': loss, ...}."
        )
    return result["loss"], {name: _metric(name, value, weight) for name, value in result.items() if name != "loss"}


def loss_in(result: Any) -> Any:
    """The loss in what a `loss_fn` returned."""
    return separate(result, 1.0)[0]


def zero_of(output: Any) -> Tensor:
    """The loss of an output without a label that counts: zero, with a graph to all that has one."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    terms = [leaf.sum() * 0.0 for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())


def counts_of_labels(labels: Sequence[Tensor], ignored: int) -> list[int]:
    """How many labels of each tensor count: those that are not `ignored`."""
    counts: list[int] = torch.stack([(each != ignored).sum() for each in labels]).tolist()
    return counts


def _metric(name: Any, given: Any, weight: float) -> Metric:
    if not isinstance(name, str) or not name:
        raise RunError(f"loss_fn returned a metric named {folded(name)}: must be a string that is not empty.")
    if isinstance(given, Sum):
        return Metric(_plain(name, given.value), None)
    if isinstance(given, Mean):
        return Metric(_plain(name, given.value), _plain(f"weight of {name}", given.weight))
    return Metric(_plain(name, given), weight)


def _plain(name: str, value: Any) -> Tensor | float:
    """A copy without a graph: the value may be a view of something that the loop changes."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, bool | int | float):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a scalar of numpy
        return float(value.item())
    seen = f"a {value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else folded(value)
    raise RunError(
        f"loss_fn returned {name!r}: {seen}: a metric must be a real number of its micro-batch. Return its mean, "
        "pipeloom.Sum(value) or pipeloom.Mean(value, weight)."
    )
