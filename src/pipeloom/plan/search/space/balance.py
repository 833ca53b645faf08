"""Blocks per stage that take the rank with most work the least time. No torch here."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from pipeloom.ir import Placement


def balanced_blocks(seconds: Sequence[float], placement: Placement) -> tuple[int, ...]:
    """The number of consecutive blocks of every stage, at least 1, with which the busiest rank has least work.

    The heaviest stage is minimized, to a small part of the longest block; stages are as even as that allows. So virtual
    stages are balanced one by one, not in sums over ranks.

    Args:
        seconds: of each block, the first with the embedding and the last with the head.
        placement: which ranks hold which stage.
    """
    return _balanced(tuple(seconds), placement)


_HALVES = 14  # of the seconds of the longest block: their part that is not decided
_ROUNDING = 1e-9  # of sums of seconds


@lru_cache(maxsize=4096)
def _balanced(seconds: tuple[float, ...], placement: Placement) -> tuple[int, ...]:
    stages, count = placement.num_stages, len(seconds)
    if stages == count:
        return (1,) * count
    sums = list(accumulate(seconds, initial=0.0))
    low = max(*seconds, sums[-1] / stages)
    high = low + max(seconds)  # with which blocks in turn fit
    alike = stages > 1 and len(set(seconds[1:-1])) == 1 and seconds[1] > 0
    for _ in range(_HALVES):
        middle = (low + high) / 2
        if _fit_alike(seconds, stages, middle) if alike else _fit(sums, stages, middle):
            high = middle
        else:
            low = middle
    return _spread(sums, stages, high * (1 + _ROUNDING))


def _fit_alike(seconds: Sequence[float], stages: int, most: float) -> bool:
    """Whether stages of at most `most` seconds are enough, where blocks but the first and the last take the same."""
    first, block, *_, last = seconds
    ends = 2 + (most - first) // block + (most - last) // block
    return ends + (stages - 2) * (most // block) >= len(seconds)


def _fit(sums: Sequence[float], stages: int, most: float) -> bool:
    """Whether stages of at most `most` seconds are enough."""
    end, last = 0, len(sums) - 1
    for _ in range(stages):
        end = bisect_right(sums, sums[end] + most) - 1
        if end >= last:
            return True
    return False


def _spread(sums: Sequence[float], stages: int, most: float) -> tuple[int, ...]:
    """Stages of at least one block and at most `most` seconds, as even as that allows."""
    last = start = len(sums) - 1
    starts = []  # the earliest of each stage but the first, backwards
    for _ in range(stages - 1):
        start = min(bisect_left(sums, sums[start] - most), start - 1)
        starts.append(start)
    cut, cuts = 0, [0]
    for stage in range(1, stages):
        high = min(bisect_right(sums, sums[cut] + most) - 1, last - (stages - stage))
        cut = max(starts.pop(), cut + 1, min(round(last * stage / stages), high))
        cuts.append(cut)
    return tuple(end - start for start, end in pairwise([*cuts, last]))
