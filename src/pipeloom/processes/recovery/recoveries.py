"""`Recoveries`: the launcher's part: starts killed ranks again or goes on without; all meet anew. No torch."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.recovery.lifeline import PEER_LOST, Loss, Memories

_NUM_COPIES = 2  # per rank: while one is written, the other is whole
_READY_SECONDS = 30.0  # from a loss until a surviving rank has left its process groups
_START_SECONDS = 300.0  # from the start of a new process until it can join
_BESIDE = (0, PEER_LOST)  # exit codes of ranks that may be started again beside one that was killed


class Tether:
    """The launcher's end of a rank's `Lifeline`, over all processes that take this rank one after another."""

    def __init__(self) -> None:
        copies = tuple(os.memfd_create("pipeloom-copy") for _ in range(_NUM_COPIES))
        self.memories = Memories(copies, os.memfd_create("pipeloom-notes"))
        self._socket, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def renew(self) -> None:
        """Another process will have the other end."""
        self._close_sockets()
        self._socket, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def end(self) -> int:
        """The descriptor of the other end, which the process inherits."""
        return self._other.fileno()

    def send(self, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        """Send a message, unless the process has ended."""
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def close(self) -> None:
        self._close_sockets()
        self.memories.close()

    def _close_sockets(self) -> None:
        self._socket.close()
        self._other.close()


class Tethers:
    """The tethers of all ranks of a run; none where it does not recover."""

    def __init__(self, count: int) -> None:
        self.by_rank = [Tether() for _ in range(count)]

    @property
    def memories(self) -> list[int]:
        """The descriptors of all memories."""
        return [each for tether in self.by_rank for each in (*tether.memories.copies, tether.memories.notes)]

    def text(self, rank: int, generation: int, end: str) -> str:
        """What the process of a rank reads in its environment; `end`: the descriptor of its end."""
        table = ";".join(str(tether.memories) for tether in self.by_rank)
        return f"{end}:{rank}:{generation}:{table}"

    def close(self) -> None:
        for tether in self.by_rank:
            tether.close()


class _Process(Protocol):
    @property
    def pid(self) -> int: ...


class RankProcess(Protocol):
    """A rank as the launcher knows it."""

    @property
    def name(self) -> str: ...
    @property
    def process(self) -> _Process: ...
    @property
    def black_box(self) -> BlackBox: ...


R = TypeVar("R", bound=RankProcess)


class Rerouting(NamedTuple):
    """How ranks go on without others, whose work they take over.

    Attributes:
        order: the ranks that go on, in the order of their new numbers.
        names: of them, in that order.
        words: how they go on.
        configuration: what they read, as JSON.
    """

    order: tuple[int, ...]
    names: tuple[str, ...]
    words: str
    configuration: str


class Recoveries(Generic[R]):
    """The recoveries of a run.

    Args:
        limit: how many there may be. Ranks that are lost at once count once, and a rank that is lost again before all
            have met counts once more.
        tethers: of all ranks.
        start: starts a rank for a generation.
        met: called when the ranks have met anew, with whether one that is lost may be started again.
        reroute: once none may be started again: how the ranks go on without some of them, which it removes from the
            ranks of the run; None: they do not.
    """

    def __init__(
        self,
        limit: int,
        tethers: Tethers,
        start: Callable[[int, int], R],
        met: Callable[[bool], None] = lambda _: None,
        reroute: Callable[[Collection[int]], Rerouting | None] = lambda _: None,
    ) -> None:
        self._limit = self._left = limit
        self._tethers, self._start, self._met, self._reroute = tethers.by_rank, start, met, reroute
        self._generation = 0
        self._loss: Loss | None = None  # while ranks get ready
        self._again: dict[int, float] = {}  # ranks that were started for this generation -> their deadlines
        self._killed = set[int]()  # ranks that were killed because they were not ready in time
        self._order: list[int] | None = None  # the numbers, before the loss, of the ranks that go on without others
        self._configuration = ""  # of these
        self._deadline = 0.0

    @property
    def pending(self) -> bool:
        """Whether ranks get ready to meet."""
        return self._loss is not None

    @property
    def begun(self) -> bool:
        """Whether the ranks have lost one of them since the run began."""
        return self._generation > 0

    @property
    def _count(self) -> str:
        return f"(recovery {self._limit - self._left} of at most {self._limit})"

    def recovers(
        self,
        ranks: MutableSequence[R],
        codes: Sequence[int | None],
        explain: Callable[[Mapping[int, int]], str],
    ) -> bool:
        """Whether the run goes on although ranks have ended; starts those again, in `ranks`, or goes on without.

        Args:
            ranks: of the run.
            codes: of the ranks that have ended; None for the others.
            explain: names the rank that was lost, how and where.
        """
        ended = {rank: code for rank, code in enumerate(codes) if code is not None}
        if self._loss is None:
            begun = self._generation > 0 or all(
                rank.black_box.phase for rank in ranks
            )  # else all wait for the lost one
            if not begun or not _can_recover(ended.values()):
                return False
            if self._left:
                self._begin(ranks, ended, explain(ended))
            elif not self._goes_on_without(ended, explain):
                return False
        elif self._order is not None:
            if ended and not self._goes_on_without(ended, explain):
                return False
        elif ended:
            if any(rank in self._again for rank in ended):
                # Killed once more on its way: one recovery less. An error of its own would come again.
                if not self._left or any(code > 0 for rank, code in ended.items() if rank in self._again):
                    return False
                self._left -= 1
            if told := {rank: code for rank, code in ended.items() if rank not in self._killed}:
                _warn(f"{explain(told)}; {_again(len(told))} {self._count}")
        for rank in ended if self._order is None else ():
            self._killed.discard(rank)
            self._again[rank] = time.monotonic() + _START_SECONDS
            ranks[rank] = self._start(rank, self._generation)
        waits = [rank for rank, each in enumerate(ranks) if each.black_box.ready != self._generation]
        if not waits:
            self._go()
        for rank in waits:
            if time.monotonic() > self._again.get(rank, self._deadline):
                self._kill(rank, ranks[rank])
        return True

    def _begin(self, ranks: Sequence[RankProcess], ended: Mapping[int, int], text: str) -> None:
        self._left -= 1
        self._generation += 1
        self._again.clear()
        self._killed.clear()
        self._loss, self._deadline = Loss(text, time.monotonic()), time.monotonic() + _READY_SECONDS
        others = ", and the other ranks keep their processes" if len(ended) < len(ranks) else ""
        _warn(f"{text}; {_again(len(ended))}{others} {self._count}")
        for rank in {*range(len(ranks))} - ended.keys():
            self._tethers[rank].send({"generation": self._generation})

    def _goes_on_without(self, ended: Mapping[int, int], explain: Callable[[Mapping[int, int]], str]) -> bool:
        """Whether the other ranks go on without those that have ended; tells them of the first loss."""
        text, count = explain(ended), len(self._tethers)
        found = self._reroute(ended.keys()) if all(code < 0 for code in ended.values()) else None
        if found is None:
            return False
        _warn(f"{text}; {found.words}")
        for rank in ended:
            self._tethers[rank].close()
        self._killed.clear()
        self._tethers[:] = [self._tethers[rank] for rank in found.order]
        numbers = range(count) if self._order is None else self._order
        self._order, self._configuration = [numbers[rank] for rank in found.order], found.configuration
        if self._loss is None:
            self._generation += 1
            self._loss, self._deadline = Loss(text, time.monotonic()), time.monotonic() + _READY_SECONDS
            self._again.clear()
            for tether in self._tethers:
                tether.send({"generation": self._generation})
        return True

    def _kill(self, rank: int, process: RankProcess) -> None:
        if rank not in self._killed:
            self._killed.add(rank)
            late = f"was started again, but not ready after {_START_SECONDS:g} s"
            if rank not in self._again:
                late = f"was not ready to go on {_READY_SECONDS:g} s after the loss"
            _warn(f"{process.name} (process {process.process.pid}) {late}; it is killed")
        with suppress(ProcessLookupError):
            os.kill(process.process.pid, signal.SIGKILL)

    def _go(self) -> None:
        """Send all ranks to a new meeting place."""
        assert self._loss is not None
        meeting = os.memfd_create("pipeloom-meeting")
        for rank, tether in enumerate(self._tethers):
            told: dict[str, object] = {}
            if self._order is not None:
                told = {"rank": rank, "order": self._order, "configuration": self._configuration}
            tether.send(self._loss._asdict() | told, [meeting])
        os.close(meeting)
        self._loss = self._order = None
        self._met(self._left > 0)


def _again(count: int) -> str:
    return "it is started again" if count == 1 else f"{count} ranks are started again"


def _warn(text: str) -> None:
    sys.stderr.write(f"pipeloom: warning: {text}\n")
    sys.stderr.flush()


def _can_recover(codes: Collection[int]) -> bool:
    """Whether a rank was killed, and none failed otherwise; from the exit codes of those that have ended."""
    return any(code < 0 for code in codes) and all(code < 0 or code in _BESIDE for code in codes)
