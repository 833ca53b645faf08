"""`RankStarter`: starts the processes of the ranks of a run. No torch."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipeloom.common.cores import usable_cores
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.host_memory import telling_of_memory
from pipeloom.processes.launching.fork_server import SERVER, ForkedProcess, ForkServer
from pipeloom.processes.recovery.recoveries import Tethers

LAUNCHED = "_PIPELOOM_LAUNCHED"  # variable: launcher's process id, descriptors of the meeting place and the black box
LIFELINE = "_PIPELOOM_LIFELINE"  # variable: the rank's `Lifeline`, in a run that recovers from the loss of ranks
_SERVER_SECONDS = 300.0  # until a fork server has imported everything
# How often a thread of OpenMP looks for work before it sleeps. The default is 300,000 times, which takes the core from
# the very thread that has the work wherever other processes compute too: steps were up to 400 times as long. 1,000 is
# what libgomp takes itself where it knows of more threads than cores.
_SPINS = "1000"


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """A rank as the launcher knows it: its name for messages, its process and its black box."""

    name: str
    process: subprocess.Popen[bytes] | ForkedProcess
    black_box: BlackBox


class RankStarter:
    """Starts the processes of a run.

    Args:
        names: one name per rank.
        arguments: of the Python interpreter.
        environment: variables to add to those of this process.
        meeting: the descriptor of the meeting place.
        tethers: of the ranks.
        elastic: of a run that goes on with other ranks; else None.
        forks: whether ranks are forked from a `ForkServer`; the first of `arguments` then call `fork_for_ranks`.
    """

    def __init__(
        self,
        names: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        meeting: int,
        tethers: Tethers,
        elastic: Generation | None,
        forks: bool,
    ) -> None:
        self._names, self._arguments, self._environment = names, arguments, environment
        self._meeting, self._tethers, self._elastic = meeting, tethers, elastic
        self._forks = forks
        self._server: ForkServer | None = None

    @property
    def prepares(self) -> bool:
        """Whether the fork server still imports; one that does not become ready is ended."""
        if self._server is None or self._server.ready or not self._server.runs:
            return False
        if time.monotonic() < self._server.began + _SERVER_SECONDS:
            return True
        self.end_server()
        sys.stderr.write(
            f"pipeloom: warning: the process that imports torch for all ranks was not ready after {_SERVER_SECONDS:g} "
            "s; each rank imports it by itself\n"
        )
        sys.stderr.flush()
        return False

    def prepare(self) -> None:
        """Start the fork server, if there is none."""
        if not self._forks or (self._server is not None and self._server.runs):
            return
        self.end_server()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            line = other.fileno()
            place = {SERVER: str(line), LAUNCHED: f"{os.getpid()}:{self._meeting}:{line}"}
            process = self._process(place, (self._meeting, line, *self._tethers.memories))
            self._server = ForkServer(process, own)

    def end_server(self) -> None:
        """End the fork server; return when it is gone."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def start(self, rank: int, generation: int) -> Rank:
        """A process that takes a rank."""
        if generation:
            self._tethers.by_rank[rank].renew()
        with anonymous_file(f"black-box-{rank}", BlackBox.SIZE) as box:
            process = self._forked(rank, generation, box) or self._started(rank, generation, box)
            return Rank(self._names[rank], process, BlackBox(box))

    def _forked(self, rank: int, generation: int, box: int) -> ForkedProcess | None:
        if self._server is None:
            return None
        place, descriptors = self._place(rank, "{0}"), [box]
        if self._tethers.by_rank:
            place[LIFELINE] = self._tethers.text(rank, generation, "{1}")
            descriptors.append(self._tethers.by_rank[rank].end)
        return self._server.fork(place, descriptors)

    def _started(self, rank: int, generation: int, box: int) -> subprocess.Popen[bytes]:
        place, descriptors = self._place(rank, str(box)), [self._meeting, box]
        if self._tethers.by_rank:
            end = self._tethers.by_rank[rank].end
            place[LIFELINE] = self._tethers.text(rank, generation, str(end))
            descriptors += [end, *self._tethers.memories]
        return self._process(place, descriptors)

    def _place(self, rank: int, box: str) -> dict[str, str]:
        """The variables of a rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if self._elastic is None else self._elastic.slots[rank]),
            "WORLD_SIZE": str(len(self._names)),
            LAUNCHED: f"{os.getpid()}:{self._meeting}:{box}",
        }

    def _process(self, place: Mapping[str, str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        num_threads = max(1, usable_cores() // len(self._names))
        defaults = {"OMP_NUM_THREADS": str(num_threads), "GLOO_SOCKET_IFNAME": "lo"}
        elastic = self._elastic
        inherited = {**os.environ, **self._environment, **(elastic.environment if elastic else {})}
        if num_threads > 1 and "OMP_WAIT_POLICY" not in inherited:
            defaults["GOMP_SPINCOUNT"] = _SPINS
        for name in (LIFELINE, SERVER):  # of a rank that launches others
            inherited.pop(name, None)
        return subprocess.Popen(
            [sys.executable, *self._arguments],
            env={**defaults, **inherited, **place},
            stdin=subprocess.DEVNULL,
            pass_fds=(*descriptors, *(elastic.inherited if elastic else ())),
            process_group=0,  # only the launcher receives Ctrl-C from the terminal, and ends the ranks
        )


@contextmanager
def anonymous_file(name: str, size: int = 0) -> Iterator[int]:
    """The descriptor of an unnamed file in memory, which children may inherit."""
    descriptor = os.memfd_create(f"pipeloom-{name}")
    try:
        with telling_of_memory(f"{name} of the launcher", size):
            os.truncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)
