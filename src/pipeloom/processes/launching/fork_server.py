"""`ForkServer`: a process that has imported all that ranks need, so that they are forked in place of started. No torch.

launcher ──starts──> fork server                      imports torch, once for all ranks
    │ ── variables and descriptors of rank 1 ──▶ │
    │                                            └──forks──> rank 1, a child process of the launcher
    │ ◀── its process id ─────────────────────── │

A fork takes some 10 ms; a new interpreter imports torch for seconds, and under load for many.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipeloom.processes.launching.parents import adopting

SERVER = "_PIPELOOM_FORK_SERVER"  # variable: in the fork server, the descriptor of its end of the line
FORKED_BY = "_PIPELOOM_FORKED_BY"  # variable: in a rank, the process id of the fork server
_MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 2
_READY, _GO = b"ready", b"go"
_FORK_SECONDS = 10.0  # how long a fork may take


class ForkedProcess:
    """A child process that the fork server has made, with the part of `subprocess.Popen` that the launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None: the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end of the process."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode


class ForkServer:
    """The launcher's side of a fork server.

    Args:
        process: of the server, which calls `fork_for_ranks`.
        line: the launcher's end of its line.

    Attributes:
        began: when it was started (time.monotonic, seconds).
    """

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._process, self._line = process, line
        self.began, self._ready = time.monotonic(), False

    @property
    def runs(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether the server has imported everything."""
        if not self._ready:
            self._line.setblocking(False)
            with suppress(OSError):
                self._ready = self._line.recv(_MESSAGE_BYTES) == _READY
        return self._ready

    def fork(self, place: Mapping[str, str], descriptors: Sequence[int]) -> ForkedProcess | None:
        """A process of a rank; None: the server is not ready, or it has ended.

        Args:
            place: variables of the rank; ``{0}``, ``{1}`` in them stand for the descriptors.
            descriptors: that the process gets.
        """
        if not (self.ready and self.runs):
            return None
        with adopting():
            try:
                self._line.settimeout(_FORK_SECONDS)
                socket.send_fds(self._line, [json.dumps(place).encode()], descriptors)
                answer = self._line.recv(_MESSAGE_BYTES)
            except OSError:  # it has just ended, or is stopped
                answer = b""
        if not answer:
            self.end()
            return None
        return ForkedProcess(int(answer))

    def end(self) -> None:
        """End the server; return when it is gone."""
        if self.runs:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._line.close()


def fork_for_ranks(line: int) -> dict[str, str] | None:
    """As the fork server: fork a process for each rank that the launcher names.

    Args:
        line: the descriptor of the server's end of the line.

    Returns:
        In a forked process the variables of its rank; in the server, once the launcher has closed the line, None.
    """
    gc.collect()
    gc.freeze()  # else a collection in a rank would write to all pages that it shares with the server
    server = str(os.getpid())
    with socket.socket(fileno=line) as end:
        with suppress(OSError):
            end.send(_READY)
        while True:
            data, descriptors, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
            if not data:
                return None
            own, other = socket.socketpair()
            with own, other:
                first = os.fork()
                if not first:
                    own.close()  # else the next process would not notice the end of the server
                    _orphan(other)
                    place = {name: text.format(*descriptors) for name, text in json.loads(data).items()}
                    return {**place, FORKED_BY: server}
                other.close()
                os.waitpid(first, 0)  # then the second process is a child of the launcher
                number = own.recv(_MESSAGE_BYTES)
                own.send(_GO)
            with suppress(OSError):
                end.send(number)
            for descriptor in descriptors:
                os.close(descriptor)


def _orphan(line: socket.socket) -> None:
    """Fork once more, send the number of that process and end; there, wait until it is an orphan, and return."""
    process = os.fork()
    if process:
        os.setpgid(process, process)  # only the launcher receives Ctrl-C from the terminal, and ends the ranks
        line.send(str(process).encode())
        os._exit(0)
    answer = b""
    with suppress(OSError):
        answer = line.recv(_MESSAGE_BYTES)
    if answer != _GO:  # the server was killed
        os._exit(1)
