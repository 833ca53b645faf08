"""`pipeloom train` on a Ray cluster: the function that each worker of ``ray.train.torch.TorchTrainer`` runs.

    Ray's worker ──starts──> pipeloom train, one rank, in a process of its own
         │                        │ metrics.jsonl, checkpoint-N/
         └─── ray.train.report ◀──┘

The rank has a main thread, signals and a process group of its own, and ends with its worker. `pipeloom launch ray`
writes the program around it.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.integrations.ray.run_files import RunFiles
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.processes.launcher import PARENT
from pipeloom.train.checkpoint.manifest import read_manifest

_POLL_SECONDS = 1.0
_END_SECONDS = 30.0  # from SIGTERM to SIGKILL of a rank whose run has failed
_OUTPUT = "--output_dir"


def train_loop(config: Mapping[str, Any]) -> None:
    """Train as one rank, and report losses, evaluations and checkpoints to Ray as they come. Every worker calls it.

    Args:
        config: ``{"arguments": [...]}``, the arguments of `pipeloom train`. ``--output_dir`` has to be a directory that
            all nodes share; ``--resume_from_checkpoint auto`` goes on after a failure.

    Raises:
        InputError: there is no ``--output_dir``.
        RuntimeError: a rank failed, or ended before its last step.
    """
    arguments = [str(word) for word in config["arguments"]]
    rank = dist.get_rank()
    files = RunFiles(_output_dir(arguments), _reported_step()) if rank == 0 else None
    command = [sys.executable, "-m", "pipeloom", "train", *arguments]
    with _ended_after(subprocess.Popen(command, env=_variables())) as process:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            code = process.poll()  # before the files are read: what the rank wrote before its end is not missed
            every = _gathered([code, [] if files is None else files.news()])
            for metrics, checkpoint in every[0][1]:  # workers report the same number of times
                kept = rank == 0 and checkpoint is not None and Path(checkpoint).is_dir()  # newer ones may replace it
                saved = ray.train.Checkpoint.from_directory(checkpoint) if kept else None
                ray.train.report(metrics, checkpoint=saved)
            codes = [code for code, _ in every]
            if failed := [f"rank {at}: {code}" for at, code in enumerate(codes) if code]:
                raise RuntimeError(f"pipeloom train ended with an exit code of {', '.join(failed)}")
            if None not in codes:
                return


def _output_dir(arguments: Sequence[str]) -> Path:
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == _OUTPUT:
            return Path(value if equals else following)
    raise InputError(
        f"{_OUTPUT} is missing: Ray's workers need a directory that all nodes share. Add it to the arguments."
    )


def _gathered(value: Any) -> list[Any]:
    """The JSON values of all workers, by rank."""
    return [json.loads(each) for each in all_gather_bytes(json.dumps(value).encode())]


def _reported_step() -> int | None:
    """The step of the newest checkpoint that Ray has, if it starts the workers again."""
    found = ray.train.get_checkpoint()
    if found is None:
        return None
    with found.as_directory() as directory:
        return read_manifest(Path(directory)).step


def _variables() -> dict[str, str]:
    """The environment of a rank: its place, and where the ranks meet, which is not where Ray's workers met."""
    with socket.socket() as free:
        free.bind(("", 0))
        host, port = _gathered([os.environ["MASTER_ADDR"], free.getsockname()[1]])[0]
    context = ray.train.get_context()
    return {
        **os.environ,
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
    }


@contextmanager
def _ended_after(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
