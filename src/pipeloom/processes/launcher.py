"""Start the ranks of a run as processes of this host, watch them, and end them all when one fails.

    launcher ──starts──> rank 0, rank 1, ...      RANK, LOCAL_RANK, WORLD_SIZE as under torchrun
       │                    │
       └─── black box ◀─────┘                     a page of shared memory for each rank: step, action, error

The ranks meet through an anonymous file (a memfd), so no port is opened and no file remains. Each rank writes its step
and its current action into its black box, which the launcher reads when the rank fails. A rank ends with its launcher.
The launcher does not import torch: it starts in a tenth of a second and takes little memory.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

from pipeloom.errors import CheckpointError, InputError, PeerLost, PipeloomError, listed, unwrapped
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.cluster_environment import meeting_of, with_rank
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.launching import torchrun
from pipeloom.processes.launching.ends import HUNG as HUNG
from pipeloom.processes.launching.ends import Stops, early_exits, end_all, ending, explain, signal_name
from pipeloom.processes.launching.fork_server import SERVER as SERVER
from pipeloom.processes.launching.fork_server import fork_for_ranks as fork_for_ranks
from pipeloom.processes.launching.parents import end_with
from pipeloom.processes.launching.ranks import LAUNCHED as LAUNCHED
from pipeloom.processes.launching.ranks import LIFELINE, Rank, RankStarter, anonymous_file
from pipeloom.processes.network.patience import telling
from pipeloom.processes.preemption import GROW, PREEMPTED, Request
from pipeloom.processes.recovery.lifeline import PEER_LOST, Lifeline
from pipeloom.processes.recovery.recoveries import Recoveries, Rerouting, Tethers

STACKS = signal.SIGUSR2  # to a rank: it prints the Python stacks of its threads
PARENT = "_PIPELOOM_PARENT"  # variable: process id of the parent, with which this process ends
_POLL_SECONDS = 0.02
_TOGETHER_SECONDS = 0.1  # how long after a first death others count as simultaneous
_CAUSE_SECONDS = 3.0  # how long the launcher waits for the rank that caused the PeerLost of others


@dataclass(frozen=True, slots=True)
class Membership:
    """This process as a rank of a run that `launch`, torchrun, srun, mpirun or Ray started.

    Attributes:
        local_rank, local_size: of this process among those of its machine.
        meeting: the ``init_method`` of torch.distributed.
        black_box: of this rank; the launcher shares it, torchrun does not.
        launched: whether `launch` started this rank, and not torchrun.
        lifeline: what outlives this rank, in a run that recovers from the loss of ranks; else None.
        configured: the configuration as given, as JSON, where the run has another layout; else None.
    """

    rank: int
    local_rank: int
    local_size: int
    world_size: int
    meeting: str
    black_box: BlackBox
    launched: bool = False
    lifeline: Lifeline | None = None
    configured: str | None = None


def membership(environment: Mapping[str, str]) -> Membership | None:
    """The membership that the environment describes; None where this process is not part of a run.

    Raises:
        InputError: RANK, LOCAL_RANK or WORLD_SIZE is not an integer, or RANK is not below WORLD_SIZE.
    """
    own, environment = environment, with_rank(environment)
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    meeting, black_box, launched, lifeline = "env://", BlackBox(), False, None
    if "RANK" not in own:
        meeting = meeting_of(environment)
    if torchrun.RUN in environment or PARENT in environment or "RANK" not in own:
        # A rank ends with torchrun's agent, Ray's worker, or what srun or mpirun have on its host.
        end_with(int(environment.get(PARENT, os.getppid())))
    if LAUNCHED in environment:
        launcher, file, box = (int(number) for number in environment[LAUNCHED].split(":"))
        end_with(launcher)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # of one rank alone, since Ctrl-C reaches the launcher
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # peers would report a loss before Python has unwound
        meeting, black_box, launched = f"file:///proc/self/fd/{file}", BlackBox(box), True
        if LIFELINE in environment:
            lifeline = Lifeline(environment[LIFELINE], black_box)
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= world_size:  # it would wait for ranks that do not exist
        raise InputError(f"RANK={rank}: must be below WORLD_SIZE={world_size}. Start the processes with torchrun.")
    local_rank = _number(environment, "LOCAL_RANK")
    local_size = max(local_rank + 1, world_size if launched else _number(environment, "LOCAL_WORLD_SIZE"))
    return Membership(rank, local_rank, local_size, world_size, meeting, black_box, launched, lifeline)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise InputError(f"{name}={text!r}: must be an integer of at least 0. Start the processes with torchrun.")
    return int(text)


@contextmanager
def last_words(member: Membership | None) -> Iterator[None]:
    """Around the work of a rank: writes an error into the black box and ends the rank with the error's exit code.

    The launcher then prints the error once for all ranks. Without the launcher, the error names the rank. Without an
    error, the black box says that the work is complete: the launcher takes any other exit with code 0 for a failure.
    """
    try:
        yield
        if member is not None:
            member.black_box.complete = 1.0
    except Exception as error:
        while member is not None and member.black_box.ending:  # other ranks have ended, and this one is about to
            time.sleep(_POLL_SECONDS)
        known = isinstance(error, PipeloomError)
        if member is None or not member.launched:
            if member is None or not known:
                raise
            if isinstance(error, PeerLost):  # threads may be inside torch, which the interpreter's clean-up would abort
                where = f" in {member.black_box.phase}" if member.black_box.phase else ""
                text = unwrapped(str(error))
                sys.stderr.write(f"pipeloom: error: rank {member.rank}{where}: {text}{_also_ended(text)}\n")
                leave(1)
            raise type(error)(f"rank {member.rank}: {error}") from error
        if not known:
            traceback.print_exc()
        member.black_box.last_words = str(error) if known else f"{type(error).__name__}: {error}"
        lost = isinstance(error, PeerLost) or _is_of_another(error, member.rank)
        leave(PEER_LOST if lost else 2 if isinstance(error, InputError) else 1)


def _also_ended(text: str) -> str:
    """The ranks of this machine that have ended under torchrun, beside the one that `text` names."""
    if torchrun.RUN not in os.environ:
        return ""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun's agent, which ends all ranks once it has seen one end
    time.sleep(_TOGETHER_SECONDS)
    ended = [rank for rank in torchrun.ended_ranks(os.environ) if not re.search(rf"\brank {rank}\)? ended", text)]
    return f"; also ended: {listed(f'rank {rank}' for rank in ended)}" if ended else ""


@contextmanager
def told_start(member: Membership | None) -> Iterator[None]:
    """Around what a rank does before it meets the others: lines say where it is, ever more rarely.

    From here on, `STACKS` to the rank prints the Python stacks of its threads, also where a C call hangs.
    """
    if member is None:
        yield
        return
    faulthandler.register(STACKS, file=2)
    main = threading.main_thread().ident or 0

    def where() -> str:
        frame = sys._current_frames()[main]
        while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen"):  # of an import
            frame = frame.f_back
        return f"rank {member.rank} still starts: {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    with telling(where):
        yield


def _is_of_another(error: BaseException | None, rank: int) -> bool:
    """Whether another rank failed in what ranks do together, such as a save, and its error was raised here too."""
    while error is not None:
        if isinstance(error, CheckpointError) and error.rank not in (None, rank):
            return True
        error = error.__cause__
    return False


def leave(code: int) -> NoReturn:
    """End this rank without the interpreter's clean-up.

    After an error the clean-up could wait for ranks that have ended. After success gloo's threads may still release
    tensors while the interpreter shuts down, which sometimes aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(
    names: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    request: Request | None = None,
    recoveries: int = 0,
    elastic: Generation | None = None,
    forks: bool = False,
) -> int:
    """Run ``python ARGUMENTS`` in one process per rank, and wait for all of them.

    When a rank fails or is killed, the launcher ends the other ranks and prints one line: which rank, how, and in which
    step and action. With `recoveries`, a rank that was killed is started again, while the others keep their processes
    (`processes/recovery/`). SIGINT, SIGTERM and SIGHUP end all ranks too, except where the launcher itself ignores
    them (SIGHUP under nohup). With the seconds of a `request`, the first SIGTERM or SIGUSR1 asks the ranks to save and
    to end (`processes/preemption.py`); ranks that start after a loss are asked once they are ready. When a rank is
    stopped, the launcher prints a warning and waits. It leaves no process and no file.

    Args:
        names: one name per rank, for messages.
        arguments: of the Python interpreter.
        environment: variables to add to those of this process.
        request: of signals, over all generations of an elastic run; None: each signal ends the ranks at once.
        recoveries: how often the run may recover from the loss of ranks.
        elastic: of a run that goes on with other ranks; the launcher tells it how these end.
        forks: whether ranks are forked from one process with all imports done, see `launching/fork_server.py`. It stays
            for the recoveries of the run.

    Returns:
        0 when all ranks succeeded, `PREEMPTED` when they saved after a signal, 2 for invalid input, 128 + number after
        a signal that ended them, else 1.

    Raises:
        InputError: this machine is not Linux: the launcher needs memfd and the parent-death signal.
    """
    if not hasattr(os, "memfd_create"):
        raise InputError(f"platform {sys.platform}: the launcher needs Linux. Use torchrun, or `--local`.")
    ranks: list[Rank] = []
    own = Tethers(len(names) if recoveries and elastic is None else 0)
    tethers = own if elastic is None else elastic.tethers
    request = Request(0.0) if request is None else request
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGUSR1] if request.seconds else [])]
    numbers += [] if elastic is None else [GROW]
    asked = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, _: request.signals.append(number)) for number in asked}
    # Ranks inherit this: a terminal with `stty tostop` stops background processes that write.
    previous[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    begun = elastic is not None and elastic.first > 0
    try:
        with anonymous_file("meeting") as meeting, ExitStack() as stack:
            starter = RankStarter(names, arguments, environment or {}, meeting, tethers, elastic, forks)
            stack.callback(starter.end_server)
            starter.prepare()
            with telling(lambda: "the process that imports torch for all ranks is not ready yet"):
                while starter.prepares and request.ending((), begun=begun) is None:
                    time.sleep(_POLL_SECONDS)
            for rank in range(len(names)):
                if request.ending((), begun=begun) is None:
                    ranks.append(starter.start(rank, 0))
            if not recoveries or (elastic is not None and elastic.inherited):  # which the server would keep in memory
                starter.end_server()
            recovering = Recoveries(
                recoveries,
                tethers,
                starter.start,
                lambda again: starter.prepare() if again else starter.end_server(),
                reroute=lambda lost: _goes_on_without(lost, ranks, elastic),
            )
            code, line = _watch(ranks, request, recovering, elastic)
            if elastic is not None:
                codes = [rank.process.returncode for rank in ranks]
                failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0, PREEMPTED)}
                elastic.note(ranks, codes, ending(ranks, failed) if failed else "", request)
                line = line if elastic.end is None else None
    finally:
        end_all(ranks)
        own.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if line is not None:
        if sys.stdout.isatty():  # a progress bar was cut off: leave its line, show the cursor again
            sys.stdout.write("\n\x1b[?25h")
            sys.stdout.flush()
        sys.stderr.write(f"pipeloom: {line}\n")
    return code


def _goes_on_without(lost: Collection[int], ranks: list[Rank], elastic: Generation | None) -> Rerouting | None:
    """How the ranks of an elastic run go on without some of them, which are removed; None: they do not."""
    found = None if elastic is None else elastic.goes_on_without(lost)
    if found is not None:
        ranks[:] = [replace(ranks[rank], name=name) for rank, name in zip(found.order, found.names, strict=True)]
    return found


def _watch(
    ranks: list[Rank],
    request: Request,
    recoveries: Recoveries[Rank],
    elastic: Generation | None,
) -> tuple[int, str | None]:
    """Wait until all ranks are done, one fails or a signal arrives; returns the exit code and the line to print."""
    deadline, stops, seen_killed = None, Stops(), False
    while True:
        if elastic is not None and elastic.wants_to_grow(request, ranks):
            request.ask(ranks)
        begun = recoveries.begun or (elastic is not None and elastic.first > 0)
        if (number := request.ending(() if recoveries.pending else ranks, begun=begun)) is not None:
            phase = "a recovery" if recoveries.pending else ranks[0].black_box.phase if ranks else ""
            return 128 + number, f"{signal_name(number)}: all ranks were ended{phase and ', in ' + phase}"
        codes = [rank.process.poll() for rank in ranks]
        early = early_exits(ranks, codes)
        if not early and all(code in (0, PREEMPTED) for code in codes):
            return PREEMPTED if PREEMPTED in codes else 0, None
        if recoveries.recovers(ranks, codes, lambda ended: ending(ranks, ended)):
            stops.look(ranks)  # tells of stopped ranks; the recovery's own deadlines end them
            time.sleep(_POLL_SECONDS)
            continue
        lost = early | {rank: code for rank, code in enumerate(codes) if code and code != PREEMPTED}
        if lost:
            deadline = deadline or time.monotonic() + _CAUSE_SECONDS
            if min(lost.values()) < 0 and None in codes and not seen_killed:
                seen_killed = True
                time.sleep(_TOGETHER_SECONDS)
                continue
            if set(lost.values()) != {PEER_LOST} or None not in codes or time.monotonic() > deadline:
                return explain(ranks, lost)
        if (text := stops.look(ranks)) is not None:
            return 1, text
        time.sleep(_POLL_SECONDS)
