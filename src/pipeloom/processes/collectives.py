"""Small collectives between the processes of a run, and the end of gloo's threads.

They pickle nothing, and raise PeerLost where a process was lost.
"""

import atexit
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLost, PipeloomError, shortened
from pipeloom.processes.waits import waits_for

_LOOK_SECONDS = 0.05  # between two checks of gloo's threads
_MOST_SECONDS = 5.0  # the user's threads may never be idle
_LOST = "another process ended, or timed out, during a collective"

# Found in RuntimeErrors about a lost process: of gloo's connections, of torch.distributed and of its stores.
_LOST_WORDS = re.compile(r"gloo/transport/|timed?[ -]?out|connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)
# What gloo adds to what it saw.
_NOT_SEEN = re.compile(r"^\[[^\]]*/gloo/[^\]]*\] |\.? This [^.]* a remote worker .*")
# Found in errors about this process alone, or about a wrong call.
_LOCAL_WORDS = re.compile(r"^\[enforce fail|out of memory|ncclUnhandledCudaError|ncclInvalid")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective or a message says that another process ended or timed out.

    For NCCL and stores torch.distributed raises its own type of error. For gloo it raises a plain RuntimeError, as for
    errors of this process alone, such as out of memory.
    """
    if isinstance(error, PipeloomError):
        return isinstance(error, PeerLost)
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    if _LOCAL_WORDS.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or _LOST_WORDS.search(str(error)) is not None


@contextmanager
def noticing_lost_peers(lost: str = _LOST) -> Iterator[None]:
    """Turn errors about a process that ended or timed out into PeerLost with the message `lost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PipeloomError) or not is_lost_peer(error):
            raise
        raise PeerLost(f"{lost} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an error, without gloo's source file and advice; backends may append a stack."""
    return shortened(_NOT_SEEN.sub("", str(error).strip().split("\n")[0]), 200)


@cache
def let_gloo_finish() -> None:
    """Register a wait for gloo's threads before the interpreter shuts down. Call it before using gloo.

    Gloo's threads release tensors shortly after a collective has returned, and need the interpreter lock for that. A
    thread that requests the lock during the shutdown is ended inside C++ code, which aborts the process.
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until all other threads sleep in two checks. A thread that waits for the interpreter lock sleeps too, but
    runs between the checks. On a busy host a runnable thread may wait long for a core.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        num_quiet = 0 if _others_work() else num_quiet + 1


def _others_work() -> bool:
    """Whether another thread of this process is runnable; False where /proc does not show threads."""
    own = str(threading.get_native_id())
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False


def cpu_group() -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]]:
    """A gloo group of all processes, and the groups to destroy later: none where the default group is a gloo group."""
    let_gloo_finish()
    if "gloo" not in dist.get_backend_config():
        made = dist.new_group(backend="gloo")
        return made, (made,)
    assert dist.group.WORLD is not None
    return dist.group.WORLD, ()


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups, with their threads and sockets. Groups that are destroyed already are skipped."""
    for group in groups:
        with suppress(ValueError):
            dist.destroy_process_group(group)


def leave_group(held: list[dist.ProcessGroup]) -> None:
    """Destroy a process group after an error, without waiting. `held` must have the last reference to it.

    Connections close with the last reference, which waits for collectives of gloo's threads that were begun.
    """
    destroy_groups(held)
    threading.Thread(target=held.clear, name="pipeloom-leave", daemon=True).start()


@waits_for(lambda at: dist.get_process_group_ranks(at["group"]))
def all_reduce(values: Tensor, group: dist.ProcessGroup, timeout_seconds: float) -> Tensor:
    """The sum over a CPU group's processes, in place.

    Raises:
        PeerLost: one of them ended or timed out.
    """
    with noticing_lost_peers():
        dist.all_reduce(values, group=group, async_op=True).wait(timedelta(seconds=timeout_seconds))
    return values


@waits_for(lambda at: dist.get_process_group_ranks(at["group"]))
def all_gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup, timeout_seconds: float) -> list[list[int]]:
    """The integers of every process of a CPU group, as many from each, in order of rank.

    Raises:
        PeerLost: one of them ended or timed out.
    """
    own = torch.tensor(numbers, dtype=torch.int64)
    rows = list(own.new_empty(group.size(), len(numbers)))
    with noticing_lost_peers():
        dist.all_gather(rows, own, group=group, async_op=True).wait(timedelta(seconds=timeout_seconds))
    return [row.tolist() for row in rows]


@waits_for(lambda at: dist.get_process_group_ranks(at["group"]))
def all_gather_bytes(
    payload: bytes,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    lost: str = _LOST,
    timeout_seconds: float | None = None,
) -> list[bytes]:
    """Every rank's bytes, in order of rank, on every rank.

    Two all-gathers: the lengths, then the bytes padded to the longest.

    Args:
        payload: of this rank.
        group: of the ranks; None: the default group.
        device: where the group's backend needs its tensors.
        lost: the message of PeerLost.
        timeout_seconds: None: the timeout of the group.

    Raises:
        PeerLost: a process ended or timed out.
    """
    timeout = () if timeout_seconds is None else (timedelta(seconds=timeout_seconds),)
    with noticing_lost_peers(lost):
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, length, group=group, async_op=True).wait(*timeout)
        sizes = [int(size) for size in lengths]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        padded = padded.to(device)
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group, async_op=True).wait(*timeout)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(gathered, sizes, strict=True)]
