"""Moments of a step at which ranks hold most activations: what is there bounds their peak from below. No torch here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.ir import Op, Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.short_steps import schedule_of, short_microbatches


class Moment(NamedTuple):
    """A backward, I or W of a rank.

    Attributes:
        live: activations per stage; with slices, those of a slice count.
        summing: stages with gradients that later backwards add to.
        stage: what computes.
        op: B, I or W.
    """

    live: Mapping[int, int]
    summing: frozenset[int]
    stage: int
    op: Op


Moments = Sequence[Sequence[Moment]]  # of each rank
_MOST_OTHERS = 8  # moments of a rank at which it holds other stages


def live_moments(schedule: Schedule) -> list[list[Moment]]:
    """Of each rank, the first and the last moment at which it holds most activations, then others that may need more.

    They have gradients of more stages, or more activations of a stage that recomputes less than others.
    """
    return [_of_rank(order, schedule) for order in schedule.orders]


def _of_rank(order: Sequence[tuple[int, Op, int | None, int | None]], schedule: Schedule) -> list[Moment]:
    ends = {stage: at for at, (stage, op, *_) in enumerate(order) if op is Op.B or op is Op.W}
    stages = list(dict.fromkeys(stage for stage, *_ in order))
    places = {stage: place for place, stage in enumerate(stages)}
    live, summing = [0] * len(stages), 0  # activations by place, and places as bits
    count = most = 0
    last: tuple[int, tuple[int, ...], int, Op] = 0, (), 0, Op.F
    first = last
    others: dict[tuple[int, tuple[int, ...]], tuple[int, Op]] = {}  # by what is there
    grown = True
    for at, (stage, op, microbatch, piece) in enumerate(order):
        place = places[stage]
        if op is Op.F:
            live[place] += 1
            count += 1
            grown = True
            continue
        if grown:
            others[summing, tuple(live)] = stage, op
            grown = False
        if count >= most:
            last = summing, tuple(live), stage, op
            first = last if count > most or not most else first
            most = count
        if op is not Op.I:
            summing = summing & ~(1 << place) if ends[stage] == at else summing | 1 << place
        if op is Op.W or (op is Op.B and (stage, microbatch, piece) not in schedule.split_backwards):
            live[place] -= 1
            count -= 1

    def moment(summing: int, live: Sequence[int], stage: int, op: Op) -> Moment:
        added = frozenset(each for place, each in enumerate(stages) if summing >> place & 1)
        return Moment(dict(zip(stages, live, strict=False)), added, stage, op)

    both = [moment(*first), moment(*last)]
    return [*both, *_unlike(both, [moment(*there, *now) for there, now in others.items()])]


def _unlike(known: Sequence[Moment], moments: Iterable[Moment]) -> list[Moment]:
    """The moments that no other one includes, from those with gradients of most stages, then most activations."""
    found: list[Moment] = []
    for moment in sorted(moments, key=lambda each: (-len(each.summing), -sum(each.live.values()))):
        if not any(_has_all(other, moment) for other in (*known, *found)):
            found.append(moment)
            if len(found) == _MOST_OTHERS:
                break
    return found


def _has_all(other: Moment, of: Moment) -> bool:
    live = other.live
    return of.summing <= other.summing and all(count <= live.get(stage, 0) for stage, count in of.live.items())


def moments_of(of: Configuration) -> Moments:
    """`live_moments` of a step. Raises ScheduleError where the schedule does not support the sizes.

    A schedule that is built for measured times and a memory limit holds one activation of each stage at least.
    """
    if schedules.find(of.schedule).to_measure:
        held = [range(rank, of.stages, of.pipeline) for rank in range(of.pipeline)]
        return [[Moment(Counter(stages), frozenset(), stages[-1], Op.I)] for stages in held]
    number, group = short_microbatches(of, of.stages)
    found = _moments(of.schedule, of.pipeline, number, of.chunks, of.slices)
    times = (of.microbatches - number) // group
    if not times:
        return found
    less = _moments(of.schedule, of.pipeline, number - group, of.chunks, of.slices)
    return [
        [
            *(
                moment._replace(live={s: n + times * max(0, n - short.live.get(s, 0)) for s, n in moment.live.items()})
                for moment, short in zip(after[:2], before, strict=False)
            ),
            *after[2:],
        ]
        for after, before in zip(found, less, strict=True)
    ]


def live_growth(of: Configuration) -> list[bool]:
    """For each rank, whether it holds more activations at once, the more micro-batches a long step has.

    A schedule that is built for measured times counts as one that does.
    """
    number, group = short_microbatches(of, of.stages)
    if schedules.find(of.schedule).to_measure:
        return [True] * of.pipeline
    both = (_moments(of.schedule, of.pipeline, size, of.chunks, of.slices) for size in (number - group, number))
    less, more = ([sum(first.live.values()) for first, *_ in moments] for moments in both)
    return [before < after for before, after in zip(less, more, strict=True)]


@lru_cache(maxsize=512)
def _moments(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> list[list[Moment]]:
    return live_moments(schedule_of(name, ranks, microbatches, chunks, slices))
