"""Bounds of a step for a part of a configuration. No torch here.

Work. A rank computes at least an even share of all F, I and W.

Memory. An activation of stage s is held from its F until its W (or B). Until then the micro-batch runs through all
later stages and back: the residence of stage s is F and I of s and of all later stages, at least. A rank holds
activations in `room` bytes. Bytes times seconds of all activations fit into room times step (Little's law), so

    step >= m * sum over stages (kept bytes * residence) / sum over ranks (room)

An activation that is offloaded is away for its residence at most, and crosses the link to the host twice. So links of
r bytes per second are like more room: r / 2 times the longest residence, per rank.

Recomputation makes `kept` smaller and the work larger. Every mixture of kinds has work and bytes between those of the
kinds, so the bound of all mixtures is the least maximum of both along the lines between them.

Data link. With one reduction per step, rank 0 cannot use stage 0 before its first unit is gathered, nor reduce it
before its last backward begins. The rest of its computations comes in between.

Schedules. `pipeline_bound` holds for any order. Of orders that give up time for memory or for even ranks, the closed
form of equal stages is known; `schedule_seconds` is that, less a margin.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import inf
from operator import mul

from pipeloom.ir import Placement
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.stage_times import Seconds

Point = tuple[float, float]  # seconds of work and seconds by memory


def residences(stages: Sequence[Seconds]) -> list[float]:
    """Seconds for which a micro-batch's activation stays on each stage, at least."""
    found, later = [], 0.0
    for each in reversed(stages):
        later += each.forward + each.backward_input
        found.append(later)
    return found[::-1]


def mixed_seconds(points: Sequence[Point]) -> float:
    """The least maximum of both numbers over all mixtures of the points."""
    best = min(max(point) for point in points)
    for (a, b), (c, d) in combinations(points, 2):
        if (a - b) * (c - d) < 0:  # along the line between them both are equal somewhere
            part = (b - a) / ((b - a) - (d - c))
            best = min(best, a + part * (c - a))
    return best


class Recomputed:
    """Work and held activations of one micro-batch for each kind of recomputation, of all stages together.

    Args:
        seconds, kept: of all stages, by kind; with no kind, residences are shortest.

    Attributes:
        longest: the largest of `residences`, that of the first stage.
        least_kept: bytes of the activations of all stages together, at least.
    """

    def __init__(
        self, seconds: Mapping[Recompute, Sequence[Seconds]], kept: Mapping[Recompute, Sequence[float]]
    ) -> None:
        work = {kind: sum(map(sum, stages)) for kind, stages in seconds.items()}
        stays = residences(seconds[min(work, key=work.__getitem__)])
        self.longest, self.least_kept = stays[0], min(map(sum, kept.values()))
        self._points = [(work[kind], sum(map(mul, kept[kind], stays))) for kind in seconds]

    def points(self, *, microbatches: int, ranks: int, room: float) -> list[Point]:
        """For each kind, the seconds of a step by work and by memory.

        Args:
            microbatches: per step.
            ranks: of the pipeline.
            room: bytes for activations of all ranks together.
        """
        return [
            (microbatches * work / ranks, microbatches * held / room if room > 0 else inf)
            for work, held in self._points
        ]


_LIKELY = 0.95  # of a closed form of equal stages, which unequal ones and few micro-batches may beat
# Bubble of equal stages in multiples of (p - 1) F of a rank, from the formulas of `pipeloom schedules`.
_BUBBLES = {
    **dict.fromkeys(("zb-h1", "zb-h2", "zb-auto", "search", "dualpipe", "dualpipev"), 1.0),
    "zb-v": 0.5,
    "v-half": 1.5,
    "v-min": 2.0,
    "chimera": 2.0,
}


def schedule_seconds(
    name: str, stages: Sequence[Seconds], placement: Placement, microbatches: int, chunks: int
) -> float:
    """What a step of a schedule takes at least, by the closed form of equal stages; 0 where there is none.

    Args:
        name: of the schedule.
        stages: seconds of every stage for one micro-batch.
        placement: where they are.
        microbatches: per step.
        chunks: virtual stages per rank.
    """
    ranks = placement.num_ranks
    mean = Seconds(*(sum(part) / ranks for part in zip(*stages, strict=True)))
    each = min(mean.forward + mean.backward_input - mean.backward_weight, sum(mean) / 3)
    factor = _BUBBLES.get(name, 0.0) * min(1.0, microbatches / (2 * ranks))  # the forms hold for many micro-batches
    if name == "hanayo":
        each, factor = sum(mean), 4 / (3 * chunks)
    gaps = ranks - 2 if any(len(holders) > 1 for holders in placement.replicas) else ranks - 1
    most = max(
        sum(sum(stages[stage]) / len(placement.replicas[stage]) for stage in held) for held in placement.stages_of
    )
    return _LIKELY * (microbatches * most + gaps * factor * max(0.0, each))
