"""`Arrivals`: which ranks of a run that starts have come to the store where they meet, and what is known of others."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from pipeloom.common.process_place import children, stat_fields
from pipeloom.processes.cluster_environment import with_rank

_STORE_SECONDS = 3.0  # for an answer of the store, which may be in a process that is stopped
T = TypeVar("T")


class Missing(NamedTuple):
    """A rank that has not come.

    Attributes:
        name: with its host, as far as it is known.
        process: its process on this host, which runs; None: there is none, or it is unknown.
        state: of the process, in words with a comma in front; empty: unknown.
        fix: a sentence.
    """

    name: str
    process: int | None
    state: str
    fix: str


class Arrivals:
    """Which ranks have come to a store, in which each notes its host.

    Args:
        store: of this start alone.
        rank, size: of this process, and number of processes.
        local_size: number of processes per host.
    """

    def __init__(self, store: Store, rank: int, size: int, local_size: int) -> None:
        self._store, self._rank, self._size, self._local_size = store, rank, size, local_size

    def note(self) -> None:
        """This process has come."""
        self._store.set(f"here/{self._rank}", socket.gethostname())

    def has_come(self, rank: int) -> bool:
        """Whether a rank has come."""
        return self._store.check([f"here/{rank}"])

    def first_missing(self) -> Missing | None:
        """The first rank that has not come; None: all have, or the store does not answer. For any thread."""
        found = _answer(lambda: self._hosts(self._store.clone()))  # type: ignore[attr-defined]
        if found is None or len(found) == self._size:
            return None
        return self._described(min({*range(self._size)} - found.keys()), found)

    def described(self, rank: int) -> Missing:
        """What is known of a rank that has not come. For any thread."""
        found = _answer(lambda: self._hosts(self._store.clone()))  # type: ignore[attr-defined]
        return self._described(rank, found or {})

    def _hosts(self, store: Store) -> dict[int, str]:
        keys = ((rank, f"here/{rank}") for rank in range(self._size))
        return {rank: store.get(key).decode() for rank, key in keys if store.check([key])}

    def _described(self, rank: int, hosts: dict[int, str]) -> Missing:
        first, own = rank - rank % self._local_size, socket.gethostname()
        near = self._rank - self._rank % self._local_size == first
        others = range(first, min(first + self._local_size, self._size))
        host = own if near else next((hosts[each] for each in others if each in hosts), None)
        look = f"Start one process per rank, and look for an error of rank {rank}."
        if host is None:
            return Missing(f"rank {rank}, from whose host no rank has come,", None, "", look)
        name = f"rank {rank} on {host}"
        if not near:
            return Missing(name, None, "", look)
        process = process_of(rank)
        if process is None:
            return Missing(name, None, ", and no process of it was found beside this one", look)
        if (stat_fields(process) or "?")[0] in "Tt":
            state = f", and its process {process} is stopped by SIGSTOP or a debugger"
            return Missing(name, None, state, f"Continue it with `kill -CONT {process}`.")
        fix = "Its Python stack is above. Start the run again."
        return Missing(name, process, f", and its process {process} has not come here", fix)


def process_of(rank: int) -> int | None:
    """The process of another rank of this run and host, which the same parent has started; None: it is not found."""
    box, own = f"/memfd:pipeloom-black-box-{rank} ", with_rank(os.environ).get("MASTER_PORT")
    for process in children(os.getppid()):
        with suppress(OSError):  # it has ended
            place = Path(f"/proc/{process}")
            words = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            found = with_rank(dict(word.split("=", 1) for word in words if "=" in word))
            if own is not None and (found.get("RANK"), found.get("MASTER_PORT")) == (str(rank), own):
                return process
            if any(os.readlink(each).startswith(box) for each in (place / "fd").iterdir()):  # of the own launcher
                return process
    return None


def _answer(ask: Callable[[], T]) -> T | None:
    """An answer of the store; None: there is none in time."""
    answers: SimpleQueue[T] = SimpleQueue()

    def asks() -> None:
        with suppress(RuntimeError):
            answers.put(ask())

    threading.Thread(target=asks, name="pipeloom-arrivals", daemon=True).start()
    try:
        return answers.get(timeout=_STORE_SECONDS)
    except Empty:
        return None
