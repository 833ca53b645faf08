"""`HangBoard`: where the watchdogs of all ranks exchange their reports, in the store of the default process group."""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from pipeloom.common.process_place import ProcessPlace
from pipeloom.processes.hang_report import Verdict

_STORE_SECONDS = 2.0  # for an answer of the store, which may be in a process that is stopped
_LOOK_SECONDS = 0.05  # between two looks for reports
T = TypeVar("T")


class HangBoard:
    """Reports and verdicts by round; without a process group, of this process alone.

    Each call of the store runs in a thread of its own, because it may block for ever.

    Attributes:
        rank, size: of this process in the default group.
        name: of this rank, such as ``rank 3 (rank 1 of replica 1)``.
        answers: whether the store answered the last call; a late answer counts.
        unreachable: a sentence about the store, for when it does not answer.
    """

    def __init__(self, name: str | None) -> None:
        self.rank, self.size, self.answers, self.name = 0, 1, True, name or "rank 0"
        self.unreachable = "the store in which the ranks met does not answer"
        self._store: Store | None = None
        self._calls: SimpleQueue[tuple[Callable[[Store], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        met_in = _get_default_store()
        self._store = PrefixStore("pipeloom/watchdog", met_in.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        own = f"rank {self.rank}"
        self.name = own if name in (None, own) else f"{own} ({name})"
        place = ProcessPlace.own(self.name)
        self._store.set(f"place/{self.rank}", json.dumps(astuple(place)))
        while isinstance(met_in, PrefixStore):
            met_in = met_in.underlying_store
        if isinstance(met_in, TCPStore):
            self.unreachable = (
                f"{socket.gethostname()} gets no answer from {met_in.host}, port {met_in.port}, where the ranks met: "
                "that host, the network, or the process there is stopped"
            )
        threading.Thread(target=self._serve, args=(self._store,), name="pipeloom-watchdog-store", daemon=True).start()

    def _serve(self, store: Store) -> None:
        while (call := self._calls.get()) is not None:
            ask, answer = call
            try:
                answer.put(ask(store))
                self.answers = True  # the link may have been cut for a while
            except RuntimeError:  # the store has ended
                self.answers = False

    def _ask(self, ask: Callable[[Store], T], default: T) -> T:
        """The store's answer, or `default` if there is none."""
        if self._store is None or not self.answers:
            return default
        answer: SimpleQueue[T] = SimpleQueue()
        self._calls.put((ask, answer))
        try:
            return answer.get(timeout=_STORE_SECONDS)
        except Empty:
            self.answers = not answer.empty()
            return default

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)

    def is_alarmed(self, number: int | str) -> bool:
        """Whether a rank has begun round `number`."""
        return self._ask(lambda store: store.check([f"alarm/{number}"]), False)

    def report(self, number: int | str, text: str) -> None:
        """Begin round `number`, with this rank's report."""

        def write(store: Store) -> None:
            store.set(f"report/{number}/{self.rank}", text)
            store.set(f"alarm/{number}", "")

        self._ask(write, None)

    def claim(self, name: int | str) -> bool:
        """Whether this rank is the first to claim the verdict of a round, or to tell of something else."""
        return self._ask(lambda store: store.add(f"claim/{name}", 1), 1) == 1

    def reports(self, number: int | str, seconds: float) -> list[bytes]:
        """The reports of the other ranks, those that come within `seconds`."""
        open_ranks, found = {*range(self.size)} - {self.rank}, []
        deadline = time.monotonic() + seconds
        while True:
            for rank in sorted(open_ranks):
                if (text := self._get(f"report/{number}/{rank}")) is not None:
                    found.append(text)
                    open_ranks.discard(rank)
            if not open_ranks or time.monotonic() > deadline or not self.answers:
                return found
            time.sleep(_LOOK_SECONDS)

    def decide(self, number: int | str, verdict: Verdict) -> None:
        """Publish the verdict of a round."""
        self._ask(lambda store: store.set(f"verdict/{number}", json.dumps(verdict)), None)

    def verdict(self, number: int | str, seconds: float) -> Verdict | None:
        """The verdict of a round; None: it does not come within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.answers:
            if (text := self._get(f"verdict/{number}")) is not None:
                culprits, line = json.loads(text)
                return Verdict(tuple(culprits), line)
            time.sleep(_LOOK_SECONDS)
        return None

    def place(self, rank: int) -> ProcessPlace | None:
        """Where a rank runs; None: unknown."""
        text = self._get(f"place/{rank}")
        return None if text is None else ProcessPlace(*json.loads(text))

    def place_of(self, process: int) -> ProcessPlace | None:
        """The place of the rank that is this process of this host; None: it is no rank."""
        places = (self.place(rank) for rank in range(self.size))
        return next((each for each in places if each and each.is_near and each.process == process), None)

    def describe(self, rank: int) -> str:
        """What is known of a rank that does not answer."""
        place = self.place(rank)
        if place is None:
            return f"rank {rank} does not answer"
        host = place.host.partition("/")[0]
        if not place.is_near:
            return (
                f"{place.name}, process {place.process} on {host}, does not answer: its host, its link or its process "
                "is stopped"
            )
        match place.state():
            case None:
                return f"{place.name}, process {place.process}, has ended"
            case "T" | "t":
                return f"{place.name}, process {place.process}, is stopped by SIGSTOP or a debugger"
            case _:
                return (
                    f"{place.name}, process {place.process}, does not answer: a C call holds Python's interpreter lock"
                )

    def _get(self, key: str) -> bytes | None:
        return self._ask(lambda store: store.get(key) if store.check([key]) else None, None)
