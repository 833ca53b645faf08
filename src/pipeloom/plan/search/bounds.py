"""Lower bounds of a step for a part of a configuration. No torch here.

Work. A rank computes at least an even share of all F, I and W.

Memory. An activation of stage s is held from its F until its W (or B). Until then the micro-batch runs through all
later stages and back: the residence of stage s is F and I of s and of all later stages, at least. A rank holds
activations in `room` bytes. Bytes times seconds of all activations fit into room times step (Little's law), so

    step >= m * sum over stages (kept bytes * residence) / sum over ranks (room)

Recomputation makes `kept` smaller and the work larger. Every mixture of kinds has work and bytes between those of the
kinds, so the bound of all mixtures is the least maximum of both along the lines between them.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

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


def recomputed_points(
    seconds: Mapping[Recompute, Sequence[Seconds]],
    kept: Mapping[Recompute, Sequence[float]],
    *,
    microbatches: int,
    ranks: int,
    room: float,
) -> list[Point]:
    """For each kind of recomputation, the seconds of a step by work and by memory.

    Args:
        seconds, kept: of all stages, by kind; with no kind, residences are shortest.
        microbatches: per step.
        ranks: of the pipeline.
        room: bytes for activations of all ranks together.
    """
    stays = residences(min(seconds.values(), key=lambda stages: sum(map(sum, stages))))
    points = []
    for kind, stages in seconds.items():
        work = microbatches * sum(map(sum, stages)) / ranks
        held = sum(size * stay for size, stay in zip(kept[kind], stays, strict=True))
        points.append((work, microbatches * held / room if room > 0 else float("inf")))
    return points
