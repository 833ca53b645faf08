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
from collections.abc import Sequence

from pipeloom.ir.action import SKIP_OPS, Action, Op
from pipeloom.ir.check.input_types import check_skips
from pipeloom.ir.schedule import (
    Program,
    Schedule,
    dependencies,
    message_after,
    peer_of,
)
from pipeloom.ir.skips import Skip, skip_receives, skip_sends

_FORWARD_OPS = (Op.F, Op.SEND_F, Op.RECV_F, Op.SEND_SKIP, Op.RECV_SKIP)


def insert_communication(schedule: Schedule, skips: Sequence[Skip] = ()) -> Program:
    """Lower `schedule` to a program with sends and receives.

    Args:
        schedule: a legal schedule.
        skips: the pairs of stages between which values skip stages. Their messages have channels of their own.
    """
    skips = tuple(skips)
    check_skips(skips, schedule.num_stages, f"program {schedule.name!r}")
    sends: list[list[list[Action]]] = []  # for each rank and position, the sends that follow
    channels: dict[tuple[int, int, bool], deque[Action]] = {}  # pending receives of each channel, in sending order
    for rank, order in enumerate(schedule.orders):
        sends.append([])
        for action in order:
            following = [] if (send := message_after(action, schedule)) is None else [send]
            following += skip_sends(action, skips, schedule.placement) if skips else []
            for send in following:
                channel = channels.setdefault(_channel(rank, peer_of(send, schedule.placement), send), deque())
                channel.append(send.other_end())
            sends[rank].append(following)

    orders = []
    for rank, order in enumerate(schedule.orders):
        lowered: list[Action] = []
        received: set[Action] = set()
        held: list[Action] = []  # the sends of an overlapped pair's first member, until the second has run
        for action, following in zip(order, sends[rank], strict=True):
            partner = schedule.partners.get(action)
            for computation in (action,) if partner is None else (action, partner):
                for receive in _receives(computation, schedule, skips):
                    pending = channels.get(_channel(peer_of(receive, schedule.placement), rank, receive))
                    while pending and receive not in received:
                        earlier = pending.popleft()
                        received.add(earlier)
                        lowered.append(earlier)
            lowered.append(action)
            held += following
            if partner is None:
                lowered += held
                held = []
        orders.append(tuple(lowered))
    return Program(schedule=schedule, orders=tuple(orders), skips=skips)


def _channel(source: int, target: int, message: Action) -> tuple[int, int, bool]:
    return source, target, message.op in SKIP_OPS


def _receives(computation: Action, schedule: Schedule, skips: Sequence[Skip]) -> list[Action]:
    """The receives that a computation may need; those of the ordinary messages also where no other rank sends them."""
    receives = []
    if computation.op is Op.F and computation.stage > 0:
        receives = [computation.with_op(Op.RECV_F)]
    elif computation.op in (Op.B, Op.I) and computation.stage < schedule.num_stages - 1:
        receives = [computation.with_op(Op.RECV_B)]
    return receives + skip_receives(computation, skips, schedule.placement) if skips else receives


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
                if action.op not in _FORWARD_OPS or not done.issuperset(dependencies(action, program)):
                    break
                done.add(action)
                length[rank] += 1
            moved = moved or length[rank] > start
    return tuple(length)
