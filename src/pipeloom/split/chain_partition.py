"""Partitions a chain of weighted layers, which may share parameters, into contiguous stages. Exact."""

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm
from typing import Any, NamedTuple, TypeVar

from pipeloom.errors import SplitError

T = TypeVar("T")
Weight = TypeVar("Weight", int, float)


class Tie(NamedTuple):
    """Parameters that several layers share. Every stage that has one or more of these layers holds them once.

    Attributes:
        size: their size, in the unit of the layers' weights; it is included in the weight of each layer.
        layers: positions of the layers, ascending; at least two.
    """

    size: float
    layers: tuple[int, ...]


def find_ties(layers: Sequence[Mapping[Any, float]]) -> list[Tie]:
    """Find the shared parameters of layers; parameters shared by the same layers form one tie.

    Args:
        layers: for each layer, the sizes of its parameters by identity: a canonical name or an ``id``.
    """
    homes: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, float] = {}
    for position, parameters in enumerate(layers):
        for key, size in parameters.items():
            homes.setdefault(key, []).append(position)
            sizes[key] = size
    together: dict[tuple[int, ...], float] = {}
    for key, home in homes.items():
        if len(home) > 1:
            together[tuple(home)] = together.get(tuple(home), 0) + sizes[key]
    return [Tie(size, home) for home, size in together.items()]


def weights_added(weights: Sequence[Weight], ties: Sequence[tuple[Weight, Sequence[int]]], first: int) -> list[Weight]:
    """The weight that layer `first` and each later one add to a stage that begins at `first`; ties count once."""
    added = list(weights[first:])
    for size, layers in ties:
        for layer in [layer for layer in layers if layer >= first][1:]:
            added[layer - first] -= size
    return added


def consecutive(items: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    """Divide `items` into consecutive lists with these numbers of items."""
    return [list(items[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]


def partition(weights: Sequence[float], num_stages: int, ties: Sequence[Tie] = ()) -> list[int]:
    """The number of consecutive layers per stage that minimizes the weight of the heaviest stage.

    Ties between optimal partitions are broken by the heaviest of stages 1, 2, ..., then of stages 2, 3, ..., and so
    on, so that early stages get the remainder of an uneven division. Every stage gets a layer, and a layer of nonzero
    weight if there are enough of them. Weights are compared exactly, as rationals. Shared parameters count once in each
    stage that has them.

    Dynamic programming over suffixes; at most ``num_stages * len(weights)**2`` steps.

    Args:
        weights: the weight of each layer, such as its parameters or seconds.
        num_stages: how many stages.
        ties: shared parameters, in the same unit.

    Raises:
        SplitError: fewer layers than stages, fewer than one stage, a negative or infinite weight.
    """
    num_layers = len(weights)
    if num_stages < 1:
        raise SplitError(f"num_stages={num_stages}: must be at least 1.")
    if num_stages > num_layers:
        raise SplitError(
            f"num_stages={num_stages}: each stage needs at least one of the {num_layers} layers. "
            f"Use num_stages={num_layers} or fewer."
        )
    for weight in weights:
        if not (isfinite(weight) and weight >= 0):
            raise SplitError(f"layer weight {weight}: must be finite and >= 0.")
    exact, shared = [Fraction(w) for w in weights], [Fraction(tie.size) for tie in ties]
    scale = lcm(*(w.denominator for w in (*exact, *shared)))
    whole = [int(w * scale) for w in exact]
    tied = [(int(size * scale), tie.layers) for size, tie in zip(shared, ties, strict=True)]
    # load[i][j]: weight of a stage with layers i..i+j
    load = [list(accumulate(weights_added(whole, tied, first))) for first in range(num_layers)]
    avoid_zero = sum(w > 0 for w in exact) >= num_stages  # every stage can get a layer of nonzero weight

    # best[i], for layers i...: ((weight of the heaviest stage, of the heaviest stage after the first, ...), counts)
    Best = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    best: Best = {num_layers: ((), ())}
    for stages_after in range(num_stages):
        longer: Best = {}
        for first in range(num_layers - stages_after):
            found = None
            for end in range(first + 1, num_layers - stages_after + 1):
                own = load[first][end - first - 1]
                if found is not None and own > found[0][0]:
                    break  # a longer stage is heavier still
                if (avoid_zero and own == 0) or end not in best:
                    continue
                heaviest, counts = best[end]
                candidate = ((max(own, heaviest[0] if heaviest else 0), *heaviest), (end - first, *counts))
                if found is None or candidate[0] < found[0]:
                    found = candidate
            if found is not None:
                longer[first] = found
        best = longer
    return list(best[0][1])
