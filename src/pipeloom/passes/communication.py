"""Put a send behind every computation whose result another rank needs, and a receive before its use.

                rank 0: 0F0 0SEND_F0 ...                 0RECV_B0 0B0
    schedule ->
                rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...

Messages from one rank to another travel in one channel, first in, first out. So a rank must list its receives from a
peer in the order in which that peer sends. Where it needs the second message before the first (chunks of both
directions on one pair of ranks), the first is received early and waits in memory. That adds no deadlock: the peer
sends the first before the second anyway.
"""

from __future__ import annotations

from collections import deque

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, Schedule

_RECEIVE = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}


def insert_communication(schedule: Schedule) -> Program:
    """Lower `schedule` to a program with SEND_F, RECV_F, SEND_B and RECV_B actions."""
    place = schedule.placement.rank_of
    last_stage = schedule.num_stages - 1
    sends: list[list[Action | None]] = []  # for each rank and position, the send that follows
    channels: dict[tuple[int, int], deque[Action]] = {}  # receives that each directed pair owes, in order of sending
    for rank, order in enumerate(schedule.orders):
        sends.append([])
        for action in order:
            send = _send_after(action, last_stage)
            if send is not None:
                consumer = action.stage + (1 if send.op is Op.SEND_F else -1)
                assert action.microbatch is not None
                peer = place(consumer, action.microbatch)
                if peer == rank:
                    send = None
                else:
                    receive = Action(consumer, _RECEIVE[send.op], action.microbatch, action.slice)
                    channels.setdefault((rank, peer), deque()).append(receive)
            sends[rank].append(send)

    orders = []
    for rank, order in enumerate(schedule.orders):
        lowered: list[Action] = []
        received: set[Action] = set()
        for action, following in zip(order, sends[rank], strict=True):
            needed = _receive_before(action, last_stage)
            if needed is not None:
                assert action.microbatch is not None
                producer = action.stage + (-1 if needed.op is Op.RECV_F else 1)
                channel = channels.get((place(producer, action.microbatch), rank))
                while channel and needed not in received:
                    earlier = channel.popleft()
                    received.add(earlier)
                    lowered.append(earlier)
            lowered.append(action)
            if following is not None:
                lowered.append(following)
        orders.append(tuple(lowered))
    return Program(schedule=schedule, orders=tuple(orders))


def _send_after(action: Action, last_stage: int) -> Action | None:
    if action.op is Op.F and action.stage < last_stage:
        return action.with_op(Op.SEND_F)
    if action.op in (Op.B, Op.I) and action.stage > 0:
        return action.with_op(Op.SEND_B)
    return None


def _receive_before(action: Action, last_stage: int) -> Action | None:
    if action.op is Op.F and action.stage > 0:
        return action.with_op(Op.RECV_F)
    if action.op in (Op.B, Op.I) and action.stage < last_stage:
        return action.with_op(Op.RECV_B)
    return None
