"""A chain of weighted layers: what some of them share, and how to cut it into contiguous stages, exactly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm
from typing import Any, NamedTuple, TypeVar

from pipeloom.errors import SplitError

Weight = TypeVar("Weight", int, float)


class Tie(NamedTuple):
    """What several layers share: a stage that has some of them holds it once, stages that have one each hold it each.

    Attributes:
        size: of it, in what the layers' weights are counted in, and a part of the weight of each.
        layers: their positions, ascending; two at least.
    """

    size: float
    layers: tuple[int, ...]


def find_ties(layers: Sequence[Mapping[Any, float]]) -> list[Tie]:
    """What layers share, one tie for all that the same layers do.

    Args:
        layers: for each, the sizes of its parameters by what makes each one: a canonical name, or an ``id``.
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
    """What layer `first` and each behind it add to a stage that begins there: what is tied, once."""
    added = list(weights[first:])
    for size, layers in ties:
        for layer in [layer for layer in layers if layer >= first][1:]:
            added[layer - first] -= size
    return added


def even_parts(total: int, num_parts: int) -> list[int]:
    """`total` things in parts as even as can be; what is over goes to the first."""
    each, over = divmod(total, num_parts)
    return [each + 1] * over + [each] * (num_parts - over)


def partition(weights: Sequence[float], num_stages: int, ties: Sequence[Tie] = ()) -> list[int]:
    """How many consecutive layers each stage gets so that the heaviest stage is as light as possible.

    Among the cuts that reach this minimum, the heaviest of stages 1, 2, ... is as light as possible, then the
    heaviest of stages 2, 3, ..., and so on: what cannot be dealt out evenly lands on the early stages. Every stage
    gets a layer, and one of nonzero weight where there are enough of them. Weights are compared exactly (as
    rationals), so equal floats are equal loads. What is tied counts once in each stage that has it.

    A dynamic programme over suffixes, at most ``num_stages * len(weights)**2`` steps.

    Raises:
        SplitError: fewer layers than stages, fewer than one stage, a negative or infinite weight.
    """
    num_layers = len(weights)
    if num_stages < 1:
        raise SplitError(f"num_stages={num_stages}: a model has at least one stage; ask for 1 or more")
    if num_stages > num_layers:
        raise SplitError(
            f"{num_stages} stages asked of {num_layers} layers: every stage needs at least one layer; "
            f"use num_stages={num_layers} or fewer"
        )
    bad = next((w for w in weights if not (isfinite(w) and w >= 0)), None)
    if bad is not None:
        raise SplitError(f"a layer weighs {bad}: weights are finite and not negative; measure or count it again")
    exact, shared = [Fraction(w) for w in weights], [Fraction(tie.size) for tie in ties]
    scale = lcm(*(w.denominator for w in (*exact, *shared)))
    whole = [int(w * scale) for w in exact]
    tied = [(int(size * scale), tie.layers) for size, tie in zip(shared, ties, strict=True)]
    # load[i][j]: of layers i..i+j
    load = [list(accumulate(weights_added(whole, tied, first))) for first in range(num_layers)]
    must_work = sum(w > 0 for w in exact) >= num_stages  # enough layers of nonzero weight for every stage to get one

    # best[i]: ((heaviest of the stages from here on, heaviest of those after the next, ...), counts) for layers i...
    Best = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    best: Best = {num_layers: ((), ())}
    for stages_after in range(num_stages):
        longer: Best = {}
        for first in range(num_layers - stages_after):
            found = None
            for end in range(first + 1, num_layers - stages_after + 1):
                own = load[first][end - first - 1]
                if found is not None and own > found[0][0]:
                    break  # only heavier from here on
                if (must_work and own == 0) or end not in best:
                    continue
                heaviest, counts = best[end]
                candidate = ((max(own, heaviest[0] if heaviest else 0), *heaviest), (end - first, *counts))
                if found is None or candidate[0] < found[0]:
                    found = candidate
            if found is not None:
                longer[first] = found
        best = longer
    return list(best[0][1])
