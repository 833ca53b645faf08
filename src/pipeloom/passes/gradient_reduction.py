"""Sum the gradients of shared parameters: tied stages and stages with replicas."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program


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
