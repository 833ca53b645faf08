"""The messages of a schedule: what a rank sends after a computation, and to which rank."""

from __future__ import annotations

from pipeloom.ir.action import OTHER_ENDS, Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule


def peer_of(action: Action, placement: Placement) -> int:
    """The rank at the other end of a SEND or RECV action."""
    assert action.microbatch is not None
    return placement.rank_of(action.stage + OTHER_ENDS[action.op][0], action.microbatch)


def message_after(action: Action, schedule: Schedule) -> Action | None:
    """The SEND of a computation's result; None if no other rank needs it."""
    stage, op, microbatch, piece = action
    if op is Op.F and stage < schedule.num_stages - 1:
        send = Action(stage, Op.SEND_F, microbatch, piece)
    elif op in (Op.B, Op.I) and stage > 0:
        send = Action(stage, Op.SEND_B, microbatch, piece)
    else:
        return None
    assert microbatch is not None
    place = schedule.placement
    return None if peer_of(send, place) == place.rank_of(stage, microbatch) else send
