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
from math import lcm

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
    partners, routes, orders = schedule.partners, _Routes(schedule, skips), []
    sends = [_sent(rank, order, routes) for rank, order in enumerate(schedule.orders)]
    for rank, order in enumerate(schedule.orders):
        lowered: list[Action] = []
        early: set[Action] = set()  # receives that came before their computations
        held: list[Action] = []  # the sends of an overlapped pair's first member, until the second has run
        for action, following in zip(order, sends[rank], strict=True):
            partner = partners.get(action) if partners else None
            for computation in (action,) if partner is None else (action, partner):
                for receive, pending in routes.into(computation, rank):
                    while pending and receive not in early:
                        earlier = pending.popleft()
                        lowered.append(earlier)
                        if earlier == receive and computation is action:
                            break
                        early.add(earlier)
            lowered.append(action)
            if partner is None:
                lowered += held + following if held else following
                held = []
            else:
                held += following
        orders.append(tuple(lowered))
    return Program(schedule=schedule, orders=tuple(orders), skips=skips)


_Channel = deque[Action]  # receives in sending order


class _Routes:
    """Where messages of a schedule go. Those of one stage and op differ in nothing but micro-batch and slice.

    Args:
        schedule: with the placement.
        skips: the pairs of stages between which values skip stages. Their messages have channels of their own.
    """

    def __init__(self, schedule: Schedule, skips: tuple[Skip, ...]) -> None:
        self._schedule, self._skips, self._placement = schedule, skips, schedule.placement
        self._period = lcm(*map(len, schedule.placement.replicas))  # of micro-batches that take the same ranks
        self._channels: dict[tuple[int, int, bool], _Channel] = {}
        self._sends: dict[object, tuple[Op, int, Op, _Channel] | None] = {}
        self._receives: dict[object, tuple[Op, _Channel] | None] = {}

    def out_of(self, action: Action, rank: int) -> list[tuple[Action, Action, _Channel]]:
        """The sends that follow a computation of a rank, each with its receive and its channel."""
        stage, op, microbatch, piece = action
        key = rank, stage, op, None if microbatch is None else microbatch % self._period
        if key not in self._sends:
            send = message_after(action, self._schedule)
            self._sends[key] = None
            if send is not None:
                other, channel = send.other_end(), self._channel(rank, peer_of(send, self._placement), send)
                self._sends[key] = send.op, other.stage, other.op, channel
        found, route = list[tuple[Action, Action, _Channel]](), self._sends[key]
        if route is not None:
            sent, other_stage, received, channel = route
            there = Action(other_stage, received, microbatch, piece)
            found.append((Action(stage, sent, microbatch, piece), there, channel))
        for send in skip_sends(action, self._skips, self._placement) if self._skips else ():
            channel = self._channel(rank, peer_of(send, self._placement), send)
            found.append((send, send.other_end(), channel))
        return found

    def into(self, action: Action, rank: int) -> list[tuple[Action, _Channel]]:
        """The receives that a computation may need, each with its channel.

        Those of the ordinary messages are there also where no other rank sends them.
        """
        stage, op, microbatch, piece = action
        key = rank, stage, op, None if microbatch is None else microbatch % self._period
        if key not in self._receives:
            self._receives[key] = None
            if (op is Op.F and stage > 0) or (op in (Op.B, Op.I) and stage < self._schedule.num_stages - 1):
                receive = action.with_op(Op.RECV_F if op is Op.F else Op.RECV_B)
                channel = self._channel(peer_of(receive, self._placement), rank, receive)
                self._receives[key] = receive.op, channel
        route = self._receives[key]
        found = [] if route is None else [(Action(stage, route[0], microbatch, piece), route[1])]
        for receive in skip_receives(action, self._skips, self._placement) if self._skips else ():
            found.append((receive, self._channel(peer_of(receive, self._placement), rank, receive)))
        return found

    def _channel(self, source: int, target: int, message: Action) -> _Channel:
        return self._channels.setdefault((source, target, message.op in SKIP_OPS), deque())


def _sent(rank: int, order: Sequence[Action], routes: _Routes) -> list[list[Action]]:
    """The sends that follow each computation of a rank, whose receives enter their channels."""
    found: list[list[Action]] = []
    for action in order:
        following = []
        for send, receive, channel in routes.out_of(action, rank):
            following.append(send)
            channel.append(receive)
        found.append(following)
    return found


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
