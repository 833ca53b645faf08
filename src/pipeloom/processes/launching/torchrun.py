"""A rank and the agent of torchrun that has started it: which one ends the other. No torch."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeloom.common.process_place import children, stat_fields
from pipeloom.processes.launching.parents import end_with_parent

RUN = "TORCHELASTIC_RUN_ID"  # variable that torchrun sets
_PROGRAMS = ("torchrun", "torch.distributed.run", "torch/distributed/run.py", "torch.distributed.launch")
_REAPERS = ("systemd", "slurmstepd", "tini", "dumb-init")  # besides process 1: adopt processes whose parent has ended
_TOGETHER_SECONDS = 0.5  # between the starts of a container's process 1 and of the program that it starts


def end_with_agent(environment: Mapping[str, str]) -> None:
    """From now on this rank ends with its parent, torchrun's agent; it ends now, with one line, if that has ended.

    A process that torchrun has not started is left alone.

    Args:
        environment: variables of this process.
    """
    if not _is_rank(environment):
        return
    parent = os.getppid()
    end_with_parent()
    if os.getppid() != parent or is_orphan(environment):
        name = f"rank {environment['RANK']}"
        sys.stderr.write(f"pipeloom: error: {name}: the torchrun that started it has ended. Start the run again.\n")
        sys.stderr.flush()
        os._exit(1)


def is_orphan(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process, and its parent has ended since.

    The kernel then gives the process another parent, mostly process 1. In a container, process 1 may also be the agent,
    or start the rank inside the container; then it is no orphan.

    Args:
        environment: variables of this process.
    """
    parent = os.getppid()
    adopts = parent == 1 or _read(parent, "comm").strip() in _REAPERS
    return _is_rank(environment) and adopts and not _starts(parent)


def _is_rank(environment: Mapping[str, str]) -> bool:
    return RUN in environment and "RANK" in environment


def _starts(parent: int) -> bool:
    """Whether the parent may have started this rank: it is an agent, or started itself for the rank."""
    if _is_agent(parent) or "/libtorch" in _read(parent, "maps"):  # or a program that uses torch's functions
        return True
    if any(word.startswith(f"{RUN}=") for word in _read(parent, "environ").split("\0")):
        return True
    fields, own = stat_fields(parent), stat_fields(os.getpid())
    return bool(fields) and int(own[19]) - int(fields[19]) < _TOGETHER_SECONDS * os.sysconf("SC_CLK_TCK")


def _is_agent(process: int) -> bool:
    """Whether the command line of a process is that of torchrun."""
    return any(word.endswith(_PROGRAMS) for word in _read(process, "cmdline").split("\0")[:4])


def _read(process: int, name: str) -> str:
    """A file of ``/proc/PROCESS``; empty: it has ended, or belongs to another user."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def ended_ranks(environment: Mapping[str, str]) -> list[int]:
    """The ranks of this machine whose processes have ended; none where torchrun is not this process's parent.

    Args:
        environment: variables of this process.
    """
    agent, names = os.getppid(), ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    processes = children(agent)
    if os.getpid() not in processes or not _is_agent(agent) or not all(name in environment for name in names):
        return []
    rank, local_rank, local_size = (int(environment[name]) for name in names)
    started = [word for each in processes for word in _read(each, "environ").split("\0")]  # empty once it has ended
    near = range(rank - local_rank, rank - local_rank + local_size)
    return [each for each in near if each != rank and f"RANK={each}" not in started]


def end_agent(environment: Mapping[str, str]) -> None:
    """End the agent of this process, which would start ranks again that refuse their input each time.

    The first rank of each agent does it, and only where a restart is left. A program that starts ranks with torch's
    functions, such as a notebook, is left alone.

    Args:
        environment: variables of this process.
    """
    count, most = (environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if environment.get("LOCAL_RANK") != "0" or not (count.isdecimal() and most.isdecimal() and int(count) < int(most)):
        return
    agent = os.getppid()
    if _is_agent(agent):
        sys.stderr.write("pipeloom: torchrun is ended: its restarts would meet the same error\n")
        sys.stderr.flush()
        with suppress(OSError):
            os.kill(agent, signal.SIGTERM)
