"""The chain of computations and transfers that makes a step as long as it is."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from pipeloom.ir.action import SKIP_OPS, Action, Op
from pipeloom.ir.schedule import awaited, message_after
from pipeloom.sim.background import LINKS
from pipeloom.sim.events import Transfer
from pipeloom.sim.spans import Span
from pipeloom.sim.timeline import Timeline


def critical_path(timeline: Timeline) -> list[tuple[int, Span]]:
    """``(rank, span)`` of the chain of computations that ends last, first to last, with the transfers between them.

    Each computation starts when the one before it on the path has ended, and its message has arrived if it crossed
    ranks. Only a shorter path makes the step shorter. A transfer over a link with a bandwidth is the span of its SEND
    on the sender's rank; if it waited for the link, the path has the transfers before it. If a message keeps its
    receiver busy, the path has the span of a RECV. Both members of an overlapped unit are on the path, or neither. A
    background transfer is on the path if a computation or the end of the step waited for it, with the transfers
    directly before it on its link. Waits inside computations are not separated.
    """
    rows = timeline.compute_spans
    if not any(rows):
        return []
    walk = _Back(timeline)
    rank = max((rank for rank, row in enumerate(rows) if row), key=lambda r: rows[r][-1].end)
    at: _Place | None = _Place(rank, len(rows[rank]) - 1)
    last = max(((s.end, r, s) for r, row in enumerate(timeline.background) for s in row), default=None)
    if last is not None and last[0] > rows[rank][-1].end:
        at = walk.beside(last[1], last[2])
    while at is not None:
        at = walk.before(at)
    return walk.path[::-1]


class _Place(NamedTuple):
    """A computation, or its part before `until`."""

    rank: int
    position: int
    until: float = math.inf


class _Cause(NamedTuple):
    """A possible cause of a wait: when it was available, and its computation and transfer."""

    there: float
    at: tuple[int, int]
    transfer: Transfer | None


class _Back:
    """Walks back from the end of a step and collects `path`."""

    def __init__(self, timeline: Timeline) -> None:
        self.path: list[tuple[int, Span]] = []
        self.rows, self.schedule = timeline.compute_spans, timeline.schedule
        self.index = {s.action: (rank, n) for rank, row in enumerate(self.rows) for n, s in enumerate(row)}
        self.sent: dict[Action | None, Transfer] = {transfer.action: transfer for transfer in timeline.transfers}
        # By stage, micro-batch and whether they are values (of an F) or gradients (of a B or I).
        self.skips_into: dict[tuple[int, int | None, bool], list[Transfer]] = {}
        for transfer in timeline.transfers:
            if transfer.action.op in SKIP_OPS:
                _, op, microbatch, _ = transfer.action
                place = transfer.action.other_stage, microbatch, op is Op.SEND_SKIP
                self.skips_into.setdefault(place, []).append(transfer)
        latency, ranks = timeline.latency_seconds, len(self.rows)
        self.latency = latency if isinstance(latency, tuple) else ((latency,) * ranks,) * ranks
        self.first_of = {second: first for first, second in timeline.overlapped}
        self.on_line = {(transfer.line, transfer.end): transfer for transfer in timeline.transfers}
        self.of_rank = {(transfer.source, transfer.end): transfer for transfer in timeline.transfers}
        self.background = timeline.background or ((),) * len(self.rows)

    def before(self, at: _Place) -> _Place | None:
        """Put a computation on the path and return the one that it waited for, None at the start."""
        rank, position, until = at
        span = self.rows[rank][position]
        if until > span.start:
            self.path.append((rank, span._replace(end=min(span.end, until))))
        causes = list(self._causes(rank, position, span))
        awaited = self._awaited(rank, span) if until > span.start else None
        if awaited is not None and all(cause.there < span.start for cause in causes):
            return self.beside(rank, awaited)
        if not causes:
            return None
        cause = max(causes, key=lambda cause: cause.there)  # of equal ones the first, which is its own rank
        taken = next((each.transfer for each in causes if each.at[0] != rank and each.transfer is not None), None)
        if taken is not None and taken.blocking and cause.at[0] == rank:
            send = taken.action
            self.path.append((rank, Span(send.other_end(), cause.there, span.start)))
        transfer, source = cause.transfer, cause.at
        while transfer is not None:
            self.path.append((transfer.source, Span(transfer.action, transfer.start, transfer.end)))
            stage, op, microbatch, piece = transfer.action
            ops = (Op.F,) if op in (Op.SEND_F, Op.SEND_SKIP) else (Op.B, Op.I)
            whole = None if op in SKIP_OPS else piece
            producers = (Action(stage, each, microbatch, whole) for each in ops)
            action = next(action for action in producers if action in self.index)
            source = self.index[self.schedule.partners.get(action, action)]
            transfer = self._held_up_by(transfer, self.rows[source[0]][source[1]].end)
        return _Place(*source)

    def _awaited(self, rank: int, span: Span) -> Span | None:
        """The background transfer that ended when a computation, or the unit that it starts, could start."""
        members = (span.action, self.schedule.partners.get(span.action, span.action))
        ended = (each for each in self.background[rank] if each.end == span.start)
        return next((each for each in ended if any(_needs(member, each.action) for member in members)), None)

    def beside(self, rank: int, span: Span) -> _Place | None:
        """Put a background transfer on the path, and those directly before it on its link; returns the computation
        after which, or in which, the first of them was issued."""
        link = [each for each in self.background[rank] if LINKS[each.action.op] == LINKS[span.action.op]]
        at = link.index(span)
        self.path.append((rank, link[at]))
        ends = [each.end for each in self.rows[rank]]
        while at and link[at - 1].end == link[at].start and link[at].start not in ends:
            at -= 1
            self.path.append((rank, link[at]))
        begun = link[at].start
        within = [n for n, each in enumerate(self.rows[rank]) if each.start <= begun < each.end and begun not in ends]
        if within:
            return _Place(rank, within[0], begun)
        before = [position for position, end in enumerate(ends) if end <= begun]
        return _Place(rank, before[-1]) if before else None

    def _causes(self, rank: int, position: int, span: Span) -> Iterable[_Cause]:
        if position:
            own, before = (rank, position - 1), self.rows[rank][position - 1]
            if before.action in self.schedule.partners:  # the second member of a unit
                yield _Cause(span.start, own, None)
                return
            sent = self._blocking(before.action)
            yield _Cause(before.end if sent is None else sent.end, own, sent)
        for need in awaited(span.action, self.schedule):
            if need not in self.index or self.index[need][0] == rank:
                continue
            source, producer = self.index[self.schedule.partners.get(need, need)]  # the end of its unit
            transfer = self.sent.get(message_after(need, self.schedule))
            if transfer is None:
                there = self.rows[source][producer].end
            else:
                there = transfer.start if transfer.blocking else transfer.end
            yield _Cause(there + self.latency[source][rank], (source, producer), transfer)
        for transfer in self.skips_into.get((span.action.stage, span.action.microbatch, span.action.op is Op.F), ()):
            place = next(
                self.index[action]
                for op in ((Op.F,) if transfer.action.op is Op.SEND_SKIP else (Op.B, Op.I))
                if (action := Action(transfer.action.stage, op, transfer.action.microbatch)) in self.index
            )
            there = transfer.start if transfer.blocking else transfer.end
            yield _Cause(there + self.latency[transfer.source][rank], place, transfer)

    def _blocking(self, action: Action) -> Transfer | None:
        """The last transfer that kept the rank of a computation busy after it."""
        for member in (action, *filter(None, (self.first_of.get(action),))):
            transfer = self.sent.get(message_after(member, self.schedule))
            if transfer is not None and transfer.blocking:
                return transfer
        return None

    def _held_up_by(self, transfer: Transfer, produced: float) -> Transfer | None:
        """The transfer that had to end before this one could start."""
        if transfer.start > transfer.ready:
            return self.on_line.get((transfer.line, transfer.start))
        if transfer.blocking and transfer.start > produced:
            return self.of_rank.get((transfer.source, transfer.start))
        return None


def _needs(action: Action, beside: Action) -> bool:
    """Whether a computation waits for a background action."""
    if beside.op is Op.UNSHARD:
        return action.stage == beside.stage and action.op in (Op.F, Op.B, Op.I)
    return action.op in (Op.B, Op.I) and beside == action.with_op(Op.RELOAD)
