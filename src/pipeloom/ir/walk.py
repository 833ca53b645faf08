"""Walk a pipeline action by action in an order that respects all dependencies, or explain a deadlock."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, Schedule, awaited, schedule_of

if TYPE_CHECKING:
    from pipeloom.ir.large.columns import Proof

_MOST_SHOWN = 4  # ranks of a deadlock that an error names


def dependency_order(pipeline: Schedule | Program) -> Iterator[tuple[int, int, Action]]:
    """Every action as ``(rank, position, action)`` in an order that respects all dependencies; O(actions).

    Raises:
        ScheduleError: actions wait for each other in a circle, or for an action that no rank runs.
    """
    schedule_of(pipeline)
    at = [0] * len(pipeline.orders)
    for rank, action, _ in walk(pipeline):
        yield rank, at[rank], action
        at[rank] += 1


def walk(pipeline: Schedule | Program) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """`dependency_order` as ``(rank, action, dependencies of the action)``.

    The F of an overlapped unit has the dependencies of both members, and its partner follows directly. A REDUCE_GRAD
    of a group comes once all its ranks have arrived at theirs.

    Raises:
        ScheduleError: actions wait for each other in a circle, or for an action that no rank runs.
    """
    schedule_of(pipeline)
    orders = [tuple(order) for order in pipeline.orders]
    position = [0] * len(orders)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    blocked: dict[int, tuple[Action, ...]] = {}  # cached needs of the action at which a rank stopped
    meetings = _Meetings(pipeline) if isinstance(pipeline, Program) else None
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        for index in range(position[rank], len(order)):
            action = order[index]
            needs = blocked.pop(rank) if rank in blocked else awaited(action, pipeline)
            if not done.issuperset(needs):
                missing = next(need for need in needs if need not in done)
                waiting.setdefault(missing, []).append(rank)
                blocked[rank] = needs
                break
            if meetings is not None and meets(action):
                others = meetings.arrive(rank, action)
                if others is None:
                    break
                ready.extend(others)
            yield rank, action, needs
            position[rank] = index + 1
            done.add(action)
            if action in waiting:
                ready.extend(waiting.pop(action))
    stuck = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
    if stuck:
        raise ScheduleError(_explain_deadlock(pipeline, position, done, stuck))


def meets(action: Action) -> bool:
    """Whether an action sums gradients of shared parameters, so the ranks of its group wait for each other."""
    return action.op is Op.REDUCE_GRAD and action.microbatch is None


def in_background(action: Action, schedule: Schedule) -> bool:
    """Whether an action overlaps with later computations of its rank.

    All-gathers and reductions of a data axis do, and offloading of activations. Reductions inside a stream do not:
    they are part of its updates.
    """
    if action.op is Op.REDUCE_GRAD:
        return action.microbatch is not None and schedule.microbatches_per_update is None
    return action.op in (Op.UNSHARD, Op.OFFLOAD, Op.RELOAD)


def proof_of(schedule: Schedule) -> "Proof | None":
    """The proof that a large schedule is legal; None for illegal ones, and for small ones, which load no numpy."""
    if not schedule.large:
        return None
    from pipeloom.ir.large.columns import prove

    return prove(schedule)


class _Meetings:
    """REDUCE_GRAD is a barrier for the ranks of its group."""

    def __init__(self, program: Program) -> None:
        self._members = {
            stage: (group, set(program.ranks_of_group(group))) for group in program.gradient_groups for stage in group
        }
        self._arrived: dict[tuple[int, ...], set[int]] = {}

    def arrive(self, rank: int, action: Action) -> list[int] | None:
        """None while other ranks are missing; then the ranks that were waiting for this one."""
        if action.stage not in self._members:
            return []
        group, members = self._members[action.stage]
        arrived = self._arrived.setdefault(group, set())
        first_time = rank not in arrived
        arrived.add(rank)
        if arrived != members:
            return None
        return [other for other in members if other != rank] if first_time else []


def _explain_deadlock(pipeline: Schedule | Program, position: list[int], done: set[Action], stuck: list[int]) -> str:
    where = {a: r for r, a in pipeline.actions()}
    chain, rank, seen = [], stuck[0], set()
    while rank not in seen:
        seen.add(rank)
        action = pipeline.orders[rank][position[rank]]
        missing = next((need for need in awaited(action, pipeline) if need not in done), None)
        if missing is None:
            chain.append(f"rank {rank} waits at {action} for its group")
            break
        chain.append(f"rank {rank} waits at {action} for {missing}")
        if missing not in where:
            return f"schedule {pipeline.name!r}: {chain[-1]}, which no rank runs. Add it to a rank."
        rank = where[missing]
    more = f"; and so on over {len(chain)} ranks" if len(chain) > _MOST_SHOWN else ""
    return (
        f"schedule {pipeline.name!r} deadlocks: {'; '.join(chain[:_MOST_SHOWN])}{more}. Ranks must not wait for each "
        "other in a circle. Move an awaited action earlier on its rank."
    )
