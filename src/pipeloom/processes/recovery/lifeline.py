"""`Lifeline`: what a rank hears when another one is lost, and the memory that outlives this rank. No torch."""

import json
import socket
from typing import NamedTuple

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


class Lifeline:
    """The end of a rank: what the launcher tells it, and the memory that outlives it.

    Args:
        text: of `Tether.text`.
        black_box: of this rank.

    Attributes:
        copies: descriptors of the memory for copies of this rank's state.
        generation: how often the run's ranks have met anew when this process joins.
    """

    def __init__(self, text: str, black_box: BlackBox) -> None:
        line, *copies, self.generation = (int(number) for number in text.split(":"))
        self.copies, self._black_box = tuple(copies), black_box
        self._socket = socket.socket(fileno=line)

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
        data, (meeting,), _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        return f"file:///proc/self/fd/{meeting}", Loss(**json.loads(data))
