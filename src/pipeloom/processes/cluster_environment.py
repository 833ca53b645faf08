"""Which rank this process is where `srun` or `mpirun` started it, from the variables that they set.

A batch script has SLURM's variables too, but is no task of a step: only a step has SLURM_STEP_NUM_TASKS. So have the
processes of an `mpirun` that starts its helpers as tasks of a step: variables of MPI come first.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from pipeloom.errors import InputError

_BASE_PORT, _PORTS = 20000, 20000  # below the ports that Linux gives to clients
_FIRST = re.compile(r"(?:[^\[,]|\[[^\]]*\])+")  # of gpu[007-012,15]-ib,login1
_RANGE = re.compile(r"\[([^\],-]+)[^\]]*\]")


class _Mpi(NamedTuple):
    """The variables of an MPI's processes."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_MPI = (
    _Mpi(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
_MPIRUNS = {
    "OMPI_MCA_orte_hnp_uri": re.compile(r"tcp://([0-9.]+)"),  # Open MPI 4: 781254656.0;tcp://192.0.2.2:45243
    "PMIX_NAMESPACE": re.compile(r"^prterun-(.+)-\d+@\d+$"),  # Open MPI 5: prterun-node1-4711@1
}


def with_rank(environment: Mapping[str, str]) -> Mapping[str, str]:
    """`environment` with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Variables that exist are kept. Without RANK, processes of ``mpirun`` get them from the variables of Open MPI, MPICH
    or Intel MPI, those of the meeting place only where they follow from them; tasks of a SLURM step with several tasks
    get them from SLURM's. Others get nothing.
    """
    if "RANK" in environment:
        return environment
    for kind in _MPI:
        if kind.local_size in environment:
            several = environment.get(kind.size, "1") != "1"
            return {**_of_mpi(environment, kind), **environment} if several else environment
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in environment:
        return {**_of_slurm(environment), **environment}
    return environment


def meeting_of(environment: Mapping[str, str]) -> str:
    """The ``init_method`` of torch.distributed: rank 0 listens there. Raises InputError if it is not known."""
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise InputError(
            "MASTER_ADDR and MASTER_PORT are not set: mpirun does not tell where processes of several hosts meet. Set "
            "them to the host of rank 0 and a free port there: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 with "
            "Open MPI, mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 with MPICH and Intel MPI."
        )
    return f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"


def _of_mpi(environment: Mapping[str, str], kind: _Mpi) -> dict[str, str]:
    found = {
        "RANK": environment.get(kind.rank, "0"),
        "WORLD_SIZE": environment[kind.size],
        "LOCAL_RANK": environment.get(kind.local_rank, "0"),
        "LOCAL_WORLD_SIZE": environment[kind.local_size],
    }
    job = environment.get("PMIX_NAMESPACE", f"parent {os.getppid()}")  # MPICH's processes know no number of their job
    if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
        return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port_of(job)}
    host = _host_of_mpirun(environment)
    return found | ({"MASTER_ADDR": host, "MASTER_PORT": _port_of(job)} if host else {})


def _host_of_mpirun(environment: Mapping[str, str]) -> str:
    """The host of Open MPI's mpirun, on which rank 0 runs unless its options say otherwise; empty: unknown."""
    for name, pattern in _MPIRUNS.items():
        if (found := pattern.search(environment.get(name, ""))) is not None:
            return found[1]
    return ""


def _port_of(job: str) -> str:
    """A port, the same for all processes of a job, which other jobs rarely have."""
    return str(_BASE_PORT + crc32(job.encode()) % _PORTS)


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_here(environment),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": _port_of(f"{job}.{step}"),
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
