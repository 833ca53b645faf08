"""`RankStarter`: starts processes for the ranks of a run, and spare ones that take a rank at once. No torch.

launcher ──starts──> rank 0   rank 1   spare         the spare imports torch, and waits at its end of a tether
                                ✗                    rank 1 is killed
         ──rank 1─────────────────────▶ spare        it reads the variables of rank 1, and joins the others
         ──starts──> spare
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pipeloom.common.cores import usable_cores
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.recovery.recoveries import Tethers

LAUNCHED = "_PIPELOOM_LAUNCHED"  # variable: launcher's process id, descriptors of the meeting place and the black box
LIFELINE = "_PIPELOOM_LIFELINE"  # variable: the rank's `Lifeline`, in a run that recovers from the loss of ranks
SPARE = "_PIPELOOM_SPARE"  # variable: the descriptor at which a spare process waits for a rank
_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """A rank as the launcher knows it: its name for messages, its process and its black box."""

    name: str
    process: subprocess.Popen[bytes]
    black_box: BlackBox


@dataclass(frozen=True, slots=True, eq=False)
class _Spare:
    process: subprocess.Popen[bytes]
    black_box: BlackBox
    box: int  # the descriptor of the black box in the process
    ends: tuple[socket.socket, socket.socket]


class RankStarter:
    """Starts the processes of a run.

    Args:
        names: one name per rank.
        arguments: of the Python interpreter.
        environment: variables to add to those of this process.
        meeting: the descriptor of the meeting place.
        tethers: of the ranks.
        elastic: of a run that goes on with other ranks; else None.
        num_spares: how many spare processes wait.
    """

    def __init__(
        self,
        names: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        meeting: int,
        tethers: Tethers,
        elastic: Generation | None,
        num_spares: int,
    ) -> None:
        self._names, self._arguments, self._environment = names, arguments, environment
        self._meeting, self._tethers, self._elastic = meeting, tethers, elastic
        self._num_spares = num_spares
        self._spares: list[_Spare] = []

    def start(self, rank: int, generation: int) -> Rank:
        """A process that takes a rank: a spare one after the first generation, if there is one; else a new one."""
        if not generation:
            return self._start(rank, generation)
        while self._spares:
            spare = self._spares.pop(0)
            if spare.process.poll() is None:
                self._tethers.by_rank[rank].take(spare.ends)
                place, _ = self._place(rank, generation, spare.box)
                with suppress(OSError):  # it has ended just now: the launcher sees that
                    spare.ends[0].send(json.dumps(place).encode())
                return Rank(self._names[rank], spare.process, spare.black_box)
            _close(spare)
        self._tethers.by_rank[rank].renew()
        return self._start(rank, generation)

    def prepare_spares(self) -> None:
        """Start the spare processes that are missing."""
        while len(self._spares) < self._num_spares:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with anonymous_file("black-box-spare", BlackBox.SIZE) as box:
                end = ends[1].fileno()
                place = {SPARE: str(end), LAUNCHED: f"{os.getpid()}:{self._meeting}:{box}"}
                process = self._process(place, (self._meeting, box, end, *self._tethers.memories))
                self._spares.append(_Spare(process, BlackBox(box), box, ends))

    def end_spares(self) -> None:
        """End the spare processes; return when all are gone."""
        for spare in self._spares:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(spare.process.pid, signal.SIGKILL)
            spare.process.wait()
            _close(spare)

    def _start(self, rank: int, generation: int) -> Rank:
        with anonymous_file(f"black-box-{rank}", BlackBox.SIZE) as box:
            place, kept = self._place(rank, generation, box)
            process = self._process(place, (self._meeting, box, *kept))
            return Rank(self._names[rank], process, BlackBox(box))

    def _place(self, rank: int, generation: int, box: int) -> tuple[dict[str, str], tuple[int, ...]]:
        """The variables of a rank, and the descriptors that it inherits."""
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if self._elastic is None else self._elastic.slots[rank]),
            "WORLD_SIZE": str(len(self._names)),
            LAUNCHED: f"{os.getpid()}:{self._meeting}:{box}",
        }
        kept: tuple[int, ...] = ()
        if self._tethers.by_rank:
            place[LIFELINE], kept = self._tethers.inherited(rank, generation)
        return place, kept

    def _process(self, place: Mapping[str, str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        num_threads = str(max(1, usable_cores() // len(self._names)))
        defaults = {"OMP_NUM_THREADS": num_threads, "GLOO_SOCKET_IFNAME": "lo"}
        elastic = self._elastic
        inherited = {**os.environ, **self._environment, **(elastic.environment if elastic else {})}
        for name in (LIFELINE, SPARE):  # of a rank that launches others
            inherited.pop(name, None)
        return subprocess.Popen(
            [sys.executable, *self._arguments],
            env={**defaults, **inherited, **place},
            stdin=subprocess.DEVNULL,
            pass_fds=(*descriptors, *(elastic.inherited if elastic else ())),
            process_group=0,  # only the launcher receives Ctrl-C from the terminal, and ends the ranks
        )


def rank_of_spare(line: int) -> dict[str, str] | None:
    """Wait, as a spare process, for a rank; returns its variables. None: the launcher has ended."""
    with socket.socket(fileno=os.dup(line)) as end:
        data = end.recv(_MESSAGE_BYTES)
    return dict(json.loads(data)) if data else None


@contextmanager
def anonymous_file(name: str, size: int = 0) -> Iterator[int]:
    """The descriptor of an unnamed file in memory, which children may inherit."""
    descriptor = os.memfd_create(f"pipeloom-{name}")
    try:
        os.truncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def _close(spare: _Spare) -> None:
    for end in spare.ends:
        end.close()
