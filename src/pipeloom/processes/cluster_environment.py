"""Which rank this process is where `srun` or `mpirun` started it, from the variables that they set.

A batch script has SLURM's variables too, but is no task of a step: only a step has SLURM_STEP_NUM_TASKS.
"""

import re
from collections.abc import Mapping
from zlib import crc32

from pipeloom.errors import InputError

_BASE_PORT, _PORTS = 20000, 20000  # below the ports that Linux gives to clients
_FIRST = re.compile(r"(?:[^\[,]|\[[^\]]*\])+")  # of gpu[007-012,15]-ib,login1
_RANGE = re.compile(r"\[([^\],-]+)[^\]]*\]")


def with_rank(environment: Mapping[str, str]) -> Mapping[str, str]:
    """`environment` with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Variables that exist are kept. Without RANK, tasks of a SLURM step with several tasks get them from SLURM's
    variables, and processes of Open MPI's ``mpirun`` the first four; others get nothing.
    """
    if "RANK" in environment:
        return environment
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in environment:
        return {**_of_slurm(environment), **environment}
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        names = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
        found = {ours: environment.get(f"OMPI_COMM_WORLD_{theirs}", "0") for theirs, ours in names.items()}
        return {**found, **environment}
    return environment


def meeting_of(environment: Mapping[str, str]) -> str:
    """The ``init_method`` of torch.distributed: rank 0 listens there. Raises InputError if it is not known."""
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise InputError(
            "MASTER_ADDR and MASTER_PORT are not set: mpirun does not tell where the processes meet. Set them to the "
            "host of rank 0 and a free port there, such as mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500."
        )
    return f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_here(environment),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": str(_BASE_PORT + crc32(f"{job}.{step}".encode()) % _PORTS),
    }


def first_host(hosts: str) -> str:
    """The first host of SLURM's list: ``gpu[007-012,15],login1`` -> ``gpu007``."""
    found = _FIRST.match(hosts)
    return _RANGE.sub(r"\1", found[0]) if found else hosts


def _tasks_here(environment: Mapping[str, str]) -> str:
    """Tasks on this node: of SLURM_STEP_TASKS_PER_NODE ``2(x3),1``, the one at SLURM_NODEID."""
    counts: list[str] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.partition("(x")
        counts += [count] * (int(times.rstrip(")")) if times else 1)
    index = int(environment.get("SLURM_NODEID", "0"))
    return counts[index] if index < len(counts) else counts[-1]
