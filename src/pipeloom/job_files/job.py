"""`Job` and `job_file`: what runs on a cluster, and the file that starts it."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError

SCHEDULERS = {  # name -> the file's usual name, and the command that takes it
    "torchrun": ("job.sh", "bash job.sh"),
    "slurm": ("job.sbatch", "sbatch job.sbatch"),
    "kubernetes": ("job.yaml", "kubectl apply -f job.yaml"),
    "kubeflow": ("trainjob.yaml", "kubectl apply -f trainjob.yaml"),
    "ray": ("job.py", "python job.py"),
    "skypilot": ("job.sky.yaml", "sky launch job.sky.yaml"),
}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # a DNS label, with room for the index of a pod
_ACCELERATOR = re.compile(r"[A-Za-z0-9.-]+")
_CPUS_PER_GPU = 8
_LEAST_NOTICE = 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of one torchrun per node.

    Attributes:
        words: what each process runs, after ``python``: ``("-m", "pipeloom", "train", ...)`` or ``("script.py", ...)``.
        nodes: number of nodes.
        gpus_per_node: GPUs per node; 0: the processes compute on CPUs.
        processes_per_node: processes per node; None: one per GPU.
        cpus_per_node: CPUs per node; None: 8 per GPU, or without GPUs one per process.
        name: of the job: small letters, digits and hyphens.
        hours: time limit (SLURM).
        notice_seconds: from the scheduler's signal to the end of the job: time for a checkpoint.
        restarts: maximum number of restarts after a failure.
        port: rendezvous port of torchrun's agents.
        image: container image with pipeloom (Kubernetes, Kubeflow).
        volume: claim of the volume that is mounted at /data (Kubernetes, Kubeflow).
        accelerator: kind of GPU, such as "H100" (SkyPilot).
        storage: where Ray keeps results: a directory or URI that all nodes reach.

    Raises:
        InputError: a value out of range.
    """

    words: tuple[str, ...]
    nodes: int
    gpus_per_node: int = 0
    processes_per_node: int | None = None
    cpus_per_node: int | None = None
    name: str = "pipeloom"
    hours: float = 24.0
    notice_seconds: int = 120
    restarts: int = 3
    port: int = 29500
    image: str = "pipeloom:latest"
    volume: str | None = None
    accelerator: str | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("restarts", 0), ("port", 1)):
            value = getattr(self, name)
            if value < least:
                raise InputError(f"{name}={value}: must be at least {least}.")
        for name in ("processes_per_node", "cpus_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: must be at least 1.")
        if not self.gpus_per_node and self.processes_per_node is None:
            raise InputError(
                "gpus_per_node=0: without GPUs, the number of processes is not known. Add --processes_per_node N."
            )
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"name={self.name}: must be small letters, digits and hyphens, at most 52, and begin with a letter."
            )
        if not 0 < self.hours <= 24 * 365:
            raise InputError(f"hours={self.hours:g}: must be more than 0, and at most {24 * 365}.")
        if self.notice_seconds < _LEAST_NOTICE:
            raise InputError(
                f"notice_seconds={self.notice_seconds}: must be at least {_LEAST_NOTICE}, so that a checkpoint can be "
                "written."
            )
        if self.port > 65535:
            raise InputError(f"port={self.port}: must be at most 65535.")

    @property
    def processes(self) -> int:
        """Processes per node."""
        return self.processes_per_node or self.gpus_per_node

    @property
    def cpus(self) -> int:
        """CPUs per node."""
        return self.cpus_per_node or max(self.processes, _CPUS_PER_GPU * self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.processes

    @property
    def time_limit(self) -> str:
        """D-HH:MM:SS."""
        minutes, seconds = divmod(round(self.hours * 3600), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"


def job_file(scheduler: str, job: Job) -> str:
    """The text of the file that starts `job`.

    Args:
        scheduler: a key of `SCHEDULERS`.
        job: what to run.

    Raises:
        InputError: the scheduler cannot run this job.
    """
    import jinja2

    if scheduler == "slurm" and job.hours * 3600 <= job.notice_seconds:
        raise InputError(
            f"hours={job.hours:g}: the job would be told to end as soon as it starts, {job.notice_seconds} s before "
            "its limit. Use more hours, or fewer --notice_seconds."
        )
    if scheduler == "skypilot":
        if job.gpus_per_node and job.accelerator is None:
            raise InputError("skypilot: the kind of GPU is missing. Add --accelerator, such as --accelerator H100.")
        if job.accelerator is not None and not _ACCELERATOR.fullmatch(job.accelerator):
            raise InputError(f"accelerator={job.accelerator!r}: must be letters, digits, '.' and '-', as A100-80GB.")
        if any("\n" in word for word in job.words):
            raise InputError("skypilot: an argument of the run has a line break, which breaks its YAML. Remove it.")
    if scheduler == "ray" and job.words[:3] != ("-m", "pipeloom", "train"):
        raise InputError(f"ray: starts `pipeloom train` alone, not {job.words[0]}. Put `train` after --.")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    return environment.get_template(f"{scheduler}.j2").render(job=job, command=shlex.join(job.words))


def _quoted(value: Any) -> str:
    """A string of Python, YAML or JSON."""
    import json

    return json.dumps(value, ensure_ascii=False)
