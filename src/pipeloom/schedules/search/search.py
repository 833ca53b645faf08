"""`search`: a schedule for given stages, links and memory caps, never longer than the best named schedule.

    p=3, m=4, equal times, no limit
    rank 0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

1. It starts from every named schedule of the same placement that keeps the memory caps, and from one micro-batch after
   the other, which needs the least memory.
2. Greedy phases play many rules for what a rank starts next and breed the best (`greedy`, `evolution`). A forward
   starts only if all in-flight micro-batches can still complete within the cap.
3. The best orders are improved by moves on the critical path (`tabu`): many a little, a few of them more.
4. Tiny steps are searched exhaustively (`exact`).

The search stops early at a lower bound (`bounds`). Finally `measure` compares the named schedules, with B and
overlapped units, and several of the best orders; the shortest is returned. The search itself ignores contention on
links, which `measure` can include.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

from pipeloom.errors import ScheduleError
from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.search.bounds import lower_bound
from pipeloom.schedules.search.exact import bound_alone, shortest
from pipeloom.schedules.search.operations import IntOrders, Work
from pipeloom.schedules.search.tabu import improve
from pipeloom.schedules.table import FAMILIES, family

_GREEDY = 0.6  # part of the effort that goes into greedy phases
_CHOSEN = (12, 4, 1)  # orders that are improved: a third of the rest for many, a third for the best of these, and so on
_TINY = 40  # actions up to which the shortest step is proved, where that needs few beginnings
_WIDTH = 300  # beginnings of the same length that are kept for that
_ALONE = ((1e-5, None), (4e-5, 2))  # beginnings for each unit of effort, and ranks, for a better bound
_NEAR = 1e-9
_MOST_MOVES = 3000  # for each order
_MEASURED = 12  # of the orders that are found
EFFORT = 6_000_000  # about a second for each million

Measure = Callable[[Schedule], float]  # seconds of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: the schedule; it keeps all caps.
        makespan: seconds of its step, from `measure`.
        best_named: name and makespan of the best named schedule of the same placement within the caps; None if no named
            schedule keeps the caps.
        lower_bound: seconds; no schedule of this placement within the caps is shorter.
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
    measure: Measure | None = None,
) -> Found:
    """Search for the shortest step under these conditions; never longer than the best named schedule's.

    Args:
        placement: which ranks hold which stage.
        num_microbatches: m.
        conditions: times, latencies and memory; equal times, no latency and no limit if not given.
        effort: work limit, about a million per second. It does not depend on the clock, so results are reproducible.
            0 plays one generation of rules and improves nothing.
        seed: random seed; the same seed finds the same schedule.
        measure: seconds of a schedule, at least as long as under `conditions`, for example with contention on links.
            It selects among the named schedules and the best orders found; default: the time under `conditions`.

    Raises:
        ScheduleError: conditions for another placement, or caps below the memory of one micro-batch.
    """
    conditions = conditions or Conditions.uniform(placement)
    if (conditions.num_stages, conditions.num_ranks) != (placement.num_stages, placement.num_ranks):
        raise ScheduleError(
            f"search over {placement.num_stages} stages on {placement.num_ranks} ranks: the conditions are for "
            f"{conditions.num_stages} stages and {conditions.num_ranks} ranks. Use conditions of the same sizes."
        )
    work = Work(placement, num_microbatches, conditions)
    _check_caps(work)
    bound = lower_bound(work)
    measure = measure or work.makespan_of
    named = _named(work)
    found, bound = _shortest(work, [work.one_by_one(), *map(work.orders_of, named)], bound, effort, seed)
    best_named = min(((measure(schedule), schedule) for schedule in named), key=itemgetter(0), default=None)
    made = [work.schedule("search", orders) for seconds, orders in found[:_MEASURED] if seconds < math.inf]
    measured = [(measure(schedule), schedule) for schedule in made]
    if best_named is not None:
        measured.append((best_named[0], replace(best_named[1], name="search")))
    makespan, schedule = min(measured, key=itemgetter(0))
    return Found(
        schedule=schedule,
        makespan=makespan,
        best_named=None if best_named is None else (best_named[1].name, best_named[0]),
        lower_bound=min(bound * min(1.0, conditions.overlap), makespan),  # as if all ran in overlapped units
    )


@family(
    "search",
    paper="pipeloom: greedy construction, then local search on the critical path",
    constraints="any p, m, v >= 1; bubble formula for v = 1, m >= 2*p-1 and no memory limit",
    bubble="<= (p-1)/(3*m+p-1)",
    peak="<= m",
    chunks=None,
    usual_chunks=1,
    to_measure=True,
    most_actions=20_000,
)
def search_loop(
    *, num_ranks: int, num_microbatches: int, num_chunks: int = 1, conditions: Conditions | None = None
) -> Schedule:
    """The schedule that `search` finds for stages in a loop."""
    placement = Placement.loop(num_ranks, num_chunks)
    return search(placement=placement, num_microbatches=num_microbatches, conditions=conditions).schedule


def _check_caps(work: Work) -> None:
    """Raises ScheduleError if a cap is below the memory of one micro-batch."""
    least = work.least_caps()
    short = [rank for rank, needed in enumerate(least) if needed > work.caps[rank]]
    if short:
        # All digits, so that a number can be pasted.
        cap, *shown = [f"{x:.0f}" if x.is_integer() else repr(x) for x in (work.conditions.caps[short[0]], *least)]
        others = f" (and ranks {', '.join(map(str, short[1:]))} theirs)" if len(short) > 1 else ""
        raise ScheduleError(
            f"search: rank {short[0]} has a cap of {cap}, but one micro-batch keeps {shown[short[0]]} there. Raise the "
            f"cap to at least that{others}. The smallest possible caps are {', '.join(shown)}."
        )


def _shortest(
    work: Work, starts: list[IntOrders], bound: float, effort: int, seed: int
) -> tuple[list[tuple[float, IntOrders]], float]:
    """The three phases; ends early at the bound. Orders with makespans, best first, and the bound."""
    found = [(work.makespan(orders), orders) for orders in starts]

    def done() -> bool:
        return min(found, key=itemgetter(0))[0] <= bound * (1 + _NEAR)

    if not done():
        from pipeloom.schedules.search.evolution import evolve

        found += evolve(work, int(effort * _GREEDY), bound, seed)
    rng = random.Random(seed)
    steps = int(effort * (1 - _GREEDY)) // (max(1, len(work.actions)) * len(_CHOSEN))
    for most in _CHOSEN:
        chosen = _different(sorted(found, key=itemgetter(0)), most)
        for _, orders in chosen:
            if not done():
                found.append(improve(work, orders, bound, min(_MOST_MOVES, steps // len(chosen)), rng))
    found.sort(key=itemgetter(0))
    makespan = found[0][0]
    if len(work.actions) <= _TINY and makespan > bound * (1 + _NEAR) and not work.replicated and effort:
        makespan, better, proved = shortest(work, makespan, _WIDTH)
        bound = max(bound, proved)
        if better:
            found.insert(0, (makespan, better))
    if not work.replicated:
        bound = _raised(work, makespan, bound, effort)
    distinct: dict[tuple[tuple[int, ...], ...], tuple[float, IntOrders]] = {}
    for makespan, orders in found:
        distinct.setdefault(tuple(map(tuple, orders)), (makespan, orders))
    return list(distinct.values()), bound


def _raised(work: Work, makespan: float, bound: float, effort: int) -> float:
    """A better bound, from each rank alone; the best ranks are tried again with more beginnings."""
    ranks = list(range(work.placement.num_ranks))
    for part, most in _ALONE:
        given = []
        for rank in ranks[:most]:
            width = int(effort * part)
            if width and makespan > bound * (1 + _NEAR):
                given.append((-bound_alone(work, rank, makespan, bound, width), rank))
        bound = max([bound, *(-least for least, _ in given)])
        ranks = [rank for _, rank in sorted(given)]
    return bound


def _different(found: list[tuple[float, IntOrders]], most: int) -> list[tuple[float, IntOrders]]:
    """The best, no two with the same makespan."""
    chosen: list[tuple[float, IntOrders]] = []
    for makespan, orders in found:
        if not chosen or makespan > chosen[-1][0] * (1 + _NEAR):
            chosen.append((makespan, orders))
    return chosen[:most]


def _named(work: Work) -> list[Schedule]:
    """The named schedules that are legal here and keep the caps."""
    placement, found = work.placement, []
    for named in FAMILIES.values():
        if named.stream or named.name == "search":
            continue  # what is searched for is one step, with a flush at its end
        try:
            schedule = named(
                num_ranks=placement.num_ranks,
                num_microbatches=work.num_microbatches,
                num_chunks=placement.num_chunks,
                conditions=work.conditions,
            )
        except ScheduleError:
            continue  # not for these sizes
        if schedule.placement == placement and work.all_fit(work.orders_of(schedule)):
            found.append(schedule)
    return found
