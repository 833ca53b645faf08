"""Sum the gradients of shared parameters (tied stages, stages with replicas), and insert the updates of a stream.

... 1B3 1SEND_B3 1STEP3 1F5 ...      the last backward of an update, the send of its result, then the update
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir import COMPUTE_OPS, Action, Op, Program
from pipeloom.ir.versions import with_updates


def insert_gradient_reduction(program: Program, tied_stages: tuple[tuple[int, ...], ...] = ()) -> Program:
    """Append REDUCE_GRAD to every rank that shares parameters with another rank.

    Args:
        program: a program with communication.
        tied_stages: groups of stages that hold the same parameters. Groups with a common stage are merged. A stage
            with replicas is always a group.

    The reductions are at the end of each order, groups in ascending order on every rank, so they cannot deadlock.
    """
    groups: list[set[int]] = [{stage} for stage, ranks in enumerate(program.placement.replicas) if len(ranks) > 1]
    for tied in tied_stages:
        touching = [group for group in groups if group & set(tied)]
        groups = [group for group in groups if not group & set(tied)] + [set(tied).union(*touching)]
    merged = sorted(tuple(sorted(group)) for group in groups)
    shared = tuple(group for group in merged if len(program.ranks_of_group(group)) > 1)
    if program.schedule.forward_only or not shared:
        return program
    orders = []
    for rank, order in enumerate(program.orders):
        held = program.placement.stages_of[rank]
        lowest = [min(stage for stage in group if stage in held) for group in shared if set(group) & set(held)]
        orders.append((*order, *(Action(stage, Op.REDUCE_GRAD) for stage in lowest)))
    return replace(program, orders=tuple(orders), gradient_groups=shared)


def insert_updates(program: Program, tied_stages: tuple[tuple[int, ...], ...] = ()) -> Program:
    """Insert STEP, and REDUCE_GRAD for stages with replicas, as `pipeloom.ir.versions.with_updates` does.

    An update comes after the send of the last backward's result, so the previous stage does not wait for the update.

    Args:
        program: a program with communication.
        tied_stages: groups of stages that hold the same parameters; unsupported in a stream.

    Raises:
        ScheduleError: there are tied stages.
    """
    schedule = program.schedule
    if schedule.microbatches_per_update is None:
        return program
    if tied_stages:
        raise ScheduleError(
            f"schedule {schedule.name!r}: stages {tied_stages[0]} hold the same parameters but update them at "
            f"different times. Weight policy {schedule.weights.value!r} needs each parameter in one stage. "
            "Untie them, or use a synchronous schedule such as 1f1b."
        )
    orders = []
    for rank, order in enumerate(program.orders):
        behind: dict[Action | None, list[Action]] = {}
        last = None
        for action in with_updates(schedule, rank):
            if action.op in COMPUTE_OPS:
                last = action
            else:
                behind.setdefault(last, []).append(action)
        orders.append(_with(order, behind))
    return replace(program, orders=tuple(orders))


def _with(order: Sequence[Action], behind: dict[Action | None, list[Action]]) -> tuple[Action, ...]:
    """`order` with actions inserted after some computations and the sends of their results."""
    result: list[Action] = []
    held: list[Action] = []
    for action in order:
        if held and action.op is not Op.SEND_B:
            result += held
            held = []
        result.append(action)
        held += behind.get(action, ())
    return (*result, *held)
