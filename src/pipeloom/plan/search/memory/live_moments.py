"""Moments of a step at which ranks hold most activations: what is there bounds their peak from below. No torch here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.ir import Action, Op, Schedule
from pipeloom.passes import merge_backwards
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.short_steps import schedule_of, short_microbatches


class Moment(NamedTuple):
    """A computation of a rank.

    Attributes:
        live: activations per stage, until their B or I; with slices, those of a slice count.
        waiting: per stage, what I has left for W.
        summing: stages with gradients that later backwards add to.
        stage: what computes.
        op: F, B, I or W.
        ends: whether it is the last backward of its stage in the step.
        following: the stage whose parameters the rank reads next, if it is another one; None: nothing is known of it.
    """

    live: Mapping[int, int]
    waiting: Mapping[int, int]
    summing: frozenset[int]
    stage: int
    op: Op
    ends: bool = False
    following: int | None = None

    @property
    def held(self) -> int:
        """Activations of all stages, with those that wait for W."""
        return sum(self.live.values()) + sum(self.waiting.values())


Moments = Sequence[Sequence[Moment]]  # of each rank
_MOST_OTHERS = 12  # moments of a rank beside the two at which it holds most


def live_moments(schedule: Schedule) -> list[list[Moment]]:
    """Of each rank, the first and the last moment at which it holds most activations, then others that may need more.

    They have gradients of more stages, more activations of a stage that recomputes less than others, more that wait for
    W, or they compute another stage: the first and the last one of a model have a table each.
    """
    last = schedule.num_stages - 1
    return [_of_rank(order, schedule, last) for order in schedule.orders]


def _of_rank(order: Sequence[Action], schedule: Schedule, last_stage: int) -> list[Moment]:
    ends = {stage: at for at, (stage, op, *_) in enumerate(order) if op is Op.B or op is Op.W}
    live = dict.fromkeys((stage for stage, *_ in order), 0)
    waiting, summing = dict.fromkeys(live, 0), frozenset[int]()
    most = -1
    first: Moment | None = None
    last = first
    others: list[Moment] = []
    known: set[object] = set()
    grown, following = True, _following(order, schedule)
    for at, (stage, op, *_) in enumerate(order):
        if op is Op.F:
            live[stage] += 1
            grown = True
        # The last stage's forward has the logits.
        if op is not Op.F or stage == last_stage:
            now = Moment(dict(live), dict(waiting), summing, stage, op, ends[stage] == at, following[at])
            new = summing, stage, op, now.ends
            if grown or stage == last_stage or op is Op.I or new not in known:
                known.add(new)
                others.append(now)
            if op is not Op.F:
                grown = False
                if (count := now.held) >= most:
                    last = now
                    first = last if count > most or first is None else first
                    most = count
        if op is Op.B or op is Op.W:
            summing = summing - {stage} if ends[stage] == at else summing | {stage}
        if op is Op.W:
            waiting[stage] -= 1
        elif op is not Op.F:
            live[stage] -= 1
            waiting[stage] += op is Op.I
    if first is None or last is None:
        return []
    return [first, last, *_unlike([first, last], others, last_stage)]


def _following(order: Sequence[Action], schedule: Schedule) -> list[int | None]:
    """For each computation, the stage of the next run of computations that read parameters, if it is another one.

    Of overlapped pairs nothing is said.
    """
    found: list[int | None] = [None] * len(order)
    if schedule.partners:
        return found
    run: int | None = None  # the stage of the run that begins behind, or goes on
    upcoming: int | None = None  # that of the first run behind it that reads
    reads = False
    for at in range(len(order) - 1, -1, -1):
        stage, op, *_ = order[at]
        if stage != run:
            upcoming = run if reads else upcoming
            run, reads = stage, False
        reads = reads or op is not Op.W
        found[at] = upcoming if upcoming != stage else None
    return found


def _unlike(known: Sequence[Moment], moments: Iterable[Moment], last_stage: int) -> list[Moment]:
    """The moments that no other one includes, from those with gradients of most stages, then most activations."""

    def kind(of: Moment) -> tuple[object, ...]:
        adding = of.stage in of.summing
        return of.stage == 0, of.stage == last_stage, of.op, adding, of.ends, of.following is None

    seen = [(kind(each), each) for each in known]
    found: list[Moment] = []
    for moment in sorted(moments, key=lambda each: (-len(each.summing), -each.held)):
        own = kind(moment)
        if not any(own == other and _has_all(each, moment) for other, each in seen):
            seen.append((own, moment))
            found.append(moment)
            if len(found) == _MOST_OTHERS:
                break
    return found


def _has_all(other: Moment, of: Moment) -> bool:
    """Whether all that is there at a moment is there at another; what waits for W is no smaller than an activation."""
    if not of.summing <= other.summing:
        return False
    return all(
        waits <= other.waiting[stage] and waits + of.live[stage] <= other.waiting[stage] + other.live[stage]
        for stage, waits in of.waiting.items()
    )


def moments_of(of: Configuration, *, merged: bool) -> Moments:
    """`live_moments` of a step.

    A schedule that is built for measured times and a memory limit holds one activation of each stage at least.

    Args:
        of: the configuration.
        merged: whether I and W that follow each other run as a whole backward.

    Raises:
        ScheduleError: the schedule does not support the sizes.
    """
    if schedules.find(of.schedule).to_measure:
        held = [range(rank, of.stages, of.pipeline) for rank in range(of.pipeline)]
        return [[Moment(Counter(stages), {}, frozenset(), stages[-1], Op.I)] for stages in held]
    number, group = short_microbatches(of, of.stages)
    found = _moments(of.schedule, of.pipeline, number, of.chunks, of.slices, merged)
    times = (of.microbatches - number) // group
    if not times:
        return found
    less = _moments(of.schedule, of.pipeline, number - group, of.chunks, of.slices, merged)
    return [
        [
            *(
                moment._replace(
                    live=_grown(moment.live, short.live, times), waiting=_grown(moment.waiting, short.waiting, times)
                )
                for moment, short in zip(after[:2], before, strict=False)
            ),
            *after[2:],
        ]
        for after, before in zip(found, less, strict=True)
    ]


def _grown(long: Mapping[int, int], short: Mapping[int, int], times: int) -> Mapping[int, int]:
    return {stage: number + times * max(0, number - short.get(stage, 0)) for stage, number in long.items()}


def live_growth(of: Configuration) -> list[bool]:
    """For each rank, whether it holds more activations at once, the more micro-batches a long step has.

    A schedule that is built for measured times counts as one that does.
    """
    number, group = short_microbatches(of, of.stages)
    if schedules.find(of.schedule).to_measure:
        return [True] * of.pipeline
    sizes = (number - group, number)
    both = (_moments(of.schedule, of.pipeline, size, of.chunks, of.slices, False) for size in sizes)
    less, more = ([rank[0].held if rank else 0 for rank in moments] for moments in both)
    return [before < after for before, after in zip(less, more, strict=True)]


@lru_cache(maxsize=512)
def _moments(name: str, ranks: int, microbatches: int, chunks: int, slices: int, merged: bool) -> list[list[Moment]]:
    schedule = schedule_of(name, ranks, microbatches, chunks, slices)
    return live_moments(merge_backwards(schedule) if merged else schedule)
