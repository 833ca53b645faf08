"""Insert a send after every computation whose result another rank needs, and a receive before its use.

                rank 0: 0F0 0SEND_F0 ...                 0RECV_B0 0B0
    schedule ->
                rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...

Messages from one rank to another use one first-in, first-out channel. A rank therefore lists its receives from a peer
in the peer's sending order. If it needs the second message before the first (chunks of both directions on one pair of
ranks), it receives the first early and keeps it in memory. This cannot deadlock: the peer sends the first before the
second anyway. An overlapped pair stays together: both receives, F and B, both sends. Later passes find these
blocks again (`pipeloom.passes.blocks`) and insert their actions around them.
"""

from collections import deque

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, Schedule, dependencies, message_after, peer_of


def insert_communication(schedule: Schedule) -> Program:
    """Lower `schedule` to a program with SEND_F, RECV_F, SEND_B and RECV_B actions."""
    last_stage = schedule.num_stages - 1
    sends: list[list[Action | None]] = []  # for each rank and position, the send that follows
    channels: dict[tuple[int, int], deque[Action]] = {}  # pending receives of each directed pair, in sending order
    for rank, order in enumerate(schedule.orders):
        sends.append([])
        for action in order:
            send = message_after(action, schedule)
            if send is not None:
                channel = channels.setdefault((rank, peer_of(send, schedule.placement)), deque())
                channel.append(send.other_end())
            sends[rank].append(send)

    orders = []
    for rank, order in enumerate(schedule.orders):
        lowered: list[Action] = []
        received: set[Action] = set()
        held: list[Action] = []  # the send of an overlapped pair's first member, until the second has run
        for action, following in zip(order, sends[rank], strict=True):
            partner = schedule.partners.get(action)
            for computation in (action,) if partner is None else (action, partner):
                if computation.op is Op.F and computation.stage > 0:
                    receive = computation.with_op(Op.RECV_F)
                elif computation.op in (Op.B, Op.I) and computation.stage < last_stage:
                    receive = computation.with_op(Op.RECV_B)
                else:
                    continue
                pending = channels.get((peer_of(receive, schedule.placement), rank))
                while pending and receive not in received:
                    earlier = pending.popleft()
                    received.add(earlier)
                    lowered.append(earlier)
            lowered.append(action)
            if following is not None:
                held.append(following)
            if partner is None:
                lowered += held
                held = []
        orders.append(tuple(lowered))
    return Program(schedule=schedule, orders=tuple(orders))


def warm_up_lengths(program: Program) -> tuple[int, ...]:
    """For each rank, the number of its first actions that need no backward of any rank.

    These actions depend only on each other, so a barrier after them on every rank cannot deadlock. They can be
    discarded and run again, because forwards do not change gradients.
    """
    length = [0] * program.num_ranks
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.orders):
            start = length[rank]
            for action in order[start:]:
                if action.op not in (Op.F, Op.SEND_F, Op.RECV_F) or not done.issuperset(dependencies(action, program)):
                    break
                done.add(action)
                length[rank] += 1
            moved = moved or length[rank] > start
    return tuple(length)
