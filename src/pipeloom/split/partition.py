"""Cut a chain of weighted layers into contiguous stages, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm

from pipeloom.errors import SplitError


def partition(weights: Sequence[float], num_stages: int) -> list[int]:
    """How many consecutive layers each stage gets so that the heaviest stage is as light as possible.

    Among the cuts that reach this minimum, the heaviest of stages 1, 2, ... is as light as possible, then the
    heaviest of stages 2, 3, ..., and so on: what cannot be dealt out evenly lands on the early stages. Every stage
    gets a layer, and one of nonzero weight where there are enough of them. Weights are compared exactly (as
    rationals), so equal floats are equal loads.

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
    exact = [Fraction(w) for w in weights]
    scale = lcm(*(w.denominator for w in exact))
    load = list(accumulate((int(w * scale) for w in exact), initial=0))  # load[j] - load[i] is that of layers i..j-1
    must_work = sum(w > 0 for w in exact) >= num_stages  # enough layers of nonzero weight for every stage to get one

    # best[i]: ((heaviest of the stages from here on, heaviest of those after the next, ...), counts) for layers i...
    Best = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    best: Best = {num_layers: ((), ())}
    for stages_after in range(num_stages):
        longer: Best = {}
        for first in range(num_layers - stages_after):
            found = None
            for end in range(first + 1, num_layers - stages_after + 1):
                own = load[end] - load[first]
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
