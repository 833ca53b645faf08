"""`search`: a schedule for these stages, these ranks, these links and this memory, never worse than a named one.

    p=3, m=4, equal times, no limit
    rank 0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

1. Every named schedule of the same placement that keeps the memory caps is a start, and so is one micro-batch after the
   other, which holds the least of all.
2. Greedy phases squeeze each of them in time under several rules: a rank that would wait takes a later F or I that is
   ready, or a W, as long as no cap breaks.
3. The best are improved by moves on the critical path.

The search stops early where it meets a bound that no order can beat.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from pipeloom.errors import ScheduleError
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.search_greedy import Rule, squeeze
from pipeloom.schedules.search_moves import improve
from pipeloom.schedules.search_work import IntOrders, Work
from pipeloom.schedules.sizes import sized
from pipeloom.schedules.table import NAMED

_STARTS = 4  # orders that are squeezed, beside one micro-batch after the other
_BEST = 3  # squeezed orders that are improved
_NEAR = 1e-9
EFFORT = 2_000_000  # actions timed while improving; about a second for each million


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        schedule: the schedule, checked to keep all caps.
        makespan: seconds of its step.
        best_named: the best named schedule of the same placement and under the same caps, with the makespan that it
            has as it is; None if none of them keeps the caps.
        lower_bound: seconds below which no schedule of this placement and within these caps can come.
    """

    schedule: Schedule
    makespan: float
    best_named: tuple[str, float] | None
    lower_bound: float


def search(
    *,
    placement: Placement,
    num_microbatches: int,
    conditions: Conditions | None = None,
    effort: int = EFFORT,
    seed: int = 0,
) -> Found:
    """Search for the shortest step under these conditions; never longer than the best named schedule's.

    Args:
        placement: which ranks hold which stage.
        num_microbatches: m.
        conditions: times, latencies and memory; equal times, no latency and no limit if not given.
        effort: actions to be timed in the improvement phase; 0 leaves it out.
        seed: of the random moves; the same seed finds the same schedule.

    Raises:
        ScheduleError: conditions for another placement, or caps below what one micro-batch holds.
    """
    conditions = conditions or Conditions.uniform(placement)
    if (conditions.num_stages, conditions.num_ranks) != (placement.num_stages, placement.num_ranks):
        raise ScheduleError(
            f"search over {placement.num_stages} stages on {placement.num_ranks} ranks: the conditions are for "
            f"{conditions.num_stages} and {conditions.num_ranks}; give one entry for each"
        )
    work = Work(placement, num_microbatches, conditions)
    least = work.one_by_one()
    for rank, order in enumerate(least):
        if not work.fits(rank, order):
            raise ScheduleError(
                f"search: rank {rank} may hold {conditions.caps[rank]:g}, but one micro-batch keeps "
                f"{sum(conditions.activation[s] for s in placement.stages_of[rank]):g} there; raise the limit"
            )
    starts, best_named = _named(work)
    bound = work.lower_bound()
    makespan, orders = _shortest(work, [least, *starts], bound, effort, random.Random(seed))
    schedule = work.schedule("search", orders)
    return Found(schedule=schedule, makespan=makespan, best_named=best_named, lower_bound=bound)


@sized
def search_loop(
    *, num_ranks: int, num_microbatches: int, num_chunks: int = 1, conditions: Conditions | None = None
) -> Schedule:
    """The schedule that `search` finds for stages in a loop."""
    placement = Placement.loop(num_ranks, num_chunks)
    return search(placement=placement, num_microbatches=num_microbatches, conditions=conditions).schedule


def _shortest(
    work: Work, starts: list[IntOrders], bound: float, effort: int, rng: random.Random
) -> tuple[float, IntOrders]:
    """Greedy phases, then improvement; ends early at the bound."""

    def done() -> bool:
        return min(found, key=_makespan)[0] <= bound * (1 + _NEAR)

    found = [(work.makespan(orders), orders) for orders in starts]
    horizon = 4 * work.placement.num_stages + 4
    for _, orders in sorted(found, key=_makespan)[:_STARTS] + found[:1]:
        for backwards_first, weights_first, stretch in product((True, False), (True, False), (1.0, 0.5, 0.0)):
            if done():
                break
            rule = Rule(backwards_first=backwards_first, weights_first=weights_first, stretch=stretch, horizon=horizon)
            squeezed = squeeze(work, orders, rule)
            found.append((work.makespan(squeezed), squeezed))
    moves = effort // (_BEST * max(1, len(work.actions)))
    for _, orders in _different(sorted(found, key=_makespan)):
        if not done():
            found.append(improve(work, orders, bound, moves, rng))
    return min(found, key=_makespan)


def _makespan(pair: tuple[float, IntOrders]) -> float:
    return pair[0]


def _different(found: list[tuple[float, IntOrders]]) -> list[tuple[float, IntOrders]]:
    """The best, no two with the same makespan."""
    chosen: list[tuple[float, IntOrders]] = []
    for makespan, orders in found:
        if not chosen or makespan > chosen[-1][0] * (1 + _NEAR):
            chosen.append((makespan, orders))
    return chosen[:_BEST]


def _named(work: Work) -> tuple[list[IntOrders], tuple[str, float] | None]:
    """The orders of the named schedules that are legal here, and the best of them as it is, B and all."""
    placement, starts = work.placement, []
    best: tuple[str, float] | None = None
    for name, family in NAMED.items():
        try:
            schedule = family(
                num_ranks=placement.num_ranks,
                num_microbatches=work.num_microbatches,
                num_chunks=placement.num_chunks,
                conditions=work.conditions,
            )
        except ScheduleError:
            continue  # not for these sizes
        if schedule.placement != placement:
            continue
        orders = work.orders_of(schedule)
        if work.all_fit(orders):
            starts.append(orders)
            makespan = work.makespan_of(schedule)
            if best is None or makespan < best[1]:
                best = (name, makespan)
    return starts, best
