"""Blocks per stage that take the rank with most work the least time. No torch here."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from pipeloom.ir import Placement


def balanced_blocks(seconds: Sequence[float], placement: Placement) -> tuple[int, ...]:
    """The number of consecutive blocks of every stage, at least 1, with which the busiest rank has least work.

    Exact where every rank holds one stage. With virtual stages, the heaviest stage is minimized first; then blocks that
    are left over go to the ranks with least work.

    Args:
        seconds: of each block, the first with the embedding and the last with the head.
        placement: which ranks hold which stage.
    """
    return _balanced(tuple(seconds), placement)


_HALVES = 14  # of the seconds of the longest block: their part that is not decided


@lru_cache(maxsize=4096)
def _balanced(seconds: tuple[float, ...], placement: Placement) -> tuple[int, ...]:
    stages, count = placement.num_stages, len(seconds)
    if stages == count:
        return (1,) * count
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    low = max(*seconds, sums[-1] / stages)
    high = low + max(seconds)  # with which blocks in turn fit
    for _ in range(_HALVES):
        middle = (low + high) / 2
        if _fits(sums, stages, middle):
            high = middle
        else:
            low = middle
    return _spread(sums, stages, high)


def _fits(sums: Sequence[float], stages: int, most: float) -> bool:
    """Whether stages of at most `most` seconds are enough."""
    end, last = 0, len(sums) - 1
    for _ in range(stages):
        end = bisect_right(sums, sums[end] + most) - 1
        if end >= last:
            return True
    return False


def _spread(sums: Sequence[float], stages: int, most: float) -> tuple[int, ...]:
    """Stages of at least one block and at most `most` seconds, as even as that allows."""
    last = len(sums) - 1
    starts = [last]  # the earliest of each stage, backwards
    for _ in range(stages):
        starts.append(min(bisect_left(sums, sums[starts[-1]] - most), starts[-1] - 1))
    cuts = [0]
    for stage in range(1, stages):
        low = max(starts[stages - stage], cuts[-1] + 1)
        high = min(bisect_right(sums, sums[cuts[-1]] + most) - 1, last - (stages - stage))
        cuts.append(max(low, min(round(last * stage / stages), high)))
    return tuple(end - start for start, end in pairwise([*cuts, last]))
