"""A program unit by unit: what tests compare runs and simulations with. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeloom.ir import Action, Op, Program
from pipeloom.ir.action import COMPUTE_OPS
from pipeloom.ir.unit_actions import UnitAction, gathers_inside, unit_actions


def unit_actions_of_rank(
    program: Program, rank: int, layers: Mapping[int, Sequence[Sequence[int]]], num_units: Mapping[int, int]
) -> Iterator[tuple[Action, UnitAction]]:
    """All unit actions of a rank of a program with a data axis, in order, each with the program's action that does it.

    Args:
        program: what the rank runs.
        rank: which.
        layers, num_units: of each of its stages, see `unit_actions`.
    """
    data, order = program.data, program.orders[rank]
    assert data is not None
    inside = gathers_inside(data)
    of_stage = {
        (stage, forward): unit_actions(layers[stage], num_units[stage], data, forward=forward)
        for stage in num_units
        for forward in (True, False)
    }
    there: set[tuple[int, int]] = set()
    left: dict[int, list[UnitAction]] = {}
    for position, action in enumerate(order):
        stage, op = action.stage, action.op
        found: Sequence[UnitAction] = ()
        if op is Op.UNSHARD:
            reader = next(a for a in order[position:] if a.stage == stage and a.op in COMPUTE_OPS and a.op is not Op.W)
            found = of_stage[stage, reader.op is Op.F].unshard
        elif op is Op.RESHARD:
            found = [UnitAction(op, unit) for unit in range(num_units[stage])]
        elif op is Op.REDUCE_GRAD:
            found = left.pop(stage, [])
        elif op in COMPUTE_OPS:
            actions = of_stage[stage, op is Op.F]
            found = [each for layer in actions.at_layer[:: 1 if op is Op.F else -1] for each in layer]
            if op is Op.B and inside:
                left[stage] = [each for each in actions.end if each.op is Op.REDUCE_GRAD]
            else:
                found += actions.end
            reduces = op is not Op.I and action.with_op(Op.REDUCE_GRAD) in program.data_reductions
            gathers = inside and op is not Op.W
            found = [each for each in found if (reduces if each.op is Op.REDUCE_GRAD else gathers)]
        for each in found:
            place = (stage, each.unit)
            if each.op is Op.REDUCE_GRAD or (each.op is Op.UNSHARD) is (place not in there):
                there ^= {place} if each.op is not Op.REDUCE_GRAD else set()
                yield action, each
