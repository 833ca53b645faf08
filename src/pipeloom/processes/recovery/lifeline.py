"""`Lifeline`: what a rank hears when another one is lost, and the memory that outlives this rank. No torch."""

import json
import os
import socket
from typing import NamedTuple, Self

from pipeloom.errors import PeerLost
from pipeloom.processes.black_box import BlackBox

PEER_LOST = 3  # exit code of a rank that failed because it lost another rank
_MESSAGE_BYTES = 1 << 16
_NOTICE_SECONDS = 10.0  # from an error about another rank to the launcher's message
_OTHER_ERROR_SECONDS = 1.0  # the same for other errors, which the loss may have caused


class Loss(NamedTuple):
    """Which rank was lost, how and where, as the launcher tells it; and when (time.monotonic, seconds)."""

    text: str
    at: float


class Rerouted(NamedTuple):
    """What a rank receives that goes on without others: its new number, and the configuration of the ranks, as JSON."""

    rank: int
    configuration: str


class Memories(NamedTuple):
    """Descriptors of the memory of one rank that outlives it.

    Attributes:
        copies: of its state.
        notes: for the other ranks, see `Notes`.
    """

    copies: tuple[int, ...]
    notes: int

    def close(self) -> None:
        """Close the descriptors of this process."""
        for descriptor in (*self.copies, self.notes):
            os.close(descriptor)

    def __str__(self) -> str:
        return ",".join(map(str, (*self.copies, self.notes)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``."""
        *copies, notes = map(int, text.split(","))
        return cls(tuple(copies), notes)


class Lifeline:
    """The end of a rank: what the launcher tells it, and the memory that outlives it.

    Args:
        text: of `Tether.text`.
        black_box: of this rank.

    Attributes:
        memories: of each rank.
        copies: descriptors of the memory for copies of this rank's state.
        generation: how often the run's ranks have met anew when this process joins.
        rerouted: set by `meet` where the ranks go on without some of them; `memories` has those that go on.
    """

    def __init__(self, text: str, black_box: BlackBox) -> None:
        line, rank, generation, table = text.split(":")
        self.generation, self._black_box = int(generation), black_box
        self.memories = [Memories.parse(each) for each in table.split(";")]
        self.copies = self.memories[int(rank)].copies
        self._socket = socket.socket(fileno=int(line))
        self.rerouted: Rerouted | None = None

    def noticed(self, error: Exception) -> bool:
        """Whether an error comes from the loss of a rank from which the run recovers; waits for the launcher's word."""
        self._socket.settimeout(_NOTICE_SECONDS if isinstance(error, PeerLost) else _OTHER_ERROR_SECONDS)
        try:
            self.generation = json.loads(self._socket.recv(_MESSAGE_BYTES))["generation"]
        except (TimeoutError, ValueError):
            return False
        return True

    def meet(self) -> tuple[str, Loss]:
        """Say that this process is ready, and wait until all are.

        Returns:
            The ``init_method`` of torch.distributed, and the rank that was lost.
        """
        self._black_box.steps = 0.0  # its next steps warm up like those of a new process
        self._black_box.ready = float(self.generation)
        self._socket.settimeout(None)
        # The descriptor stays open: the store of a process group opens its file again and again.
        data, found, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        while data and not found:  # all ranks are about to end
            self._black_box.ready = float(json.loads(data)["generation"])
            data, found, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        told, self.rerouted = json.loads(data), None
        if "order" in told:
            kept = [self.memories[rank] for rank in told["order"]]
            for memories in self.memories:
                if memories not in kept:  # of a rank that was lost: the last descriptors
                    memories.close()
            self.memories = kept
            self.rerouted = Rerouted(told["rank"], told["configuration"])
        return f"file:///proc/self/fd/{found[0]}", Loss(told["text"], told["at"])
