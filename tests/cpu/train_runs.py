"""Runs of `pipeloom train` on a tiny text: in this process, as processes forked from it, and under torchrun."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.processes.launching import ranks as ranks_launcher
from pipeloom.train import loop  # noqa: F401  # forks have it loaded
from pipeloom.train.config import automatic, validate  # noqa: F401

parse([])  # makes the parser, which forks have then

WORDS = [
    "the",
    "loom",
    "weaves",
    "micro",
    "batches",
    "through",
    "ranks",
    "and",
    "stages",
    "until",
    "all",
    "are",
    "done",
]

STEP_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "bubble_fraction",
    "predicted_bubble_fraction", "peak_memory_bytes", "live_activations",
}  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    for number in range(8):
        (directory / f"{number}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(200)))
    return directory


def words(text: Path, output_dir: Path, *more: str) -> list[str]:
    """The command line of a tiny run; options given again in `more` count."""
    base = {
        "data.path": text, "output_dir": output_dir, "data.validation_fraction": 0.3, "steps": 9, "save_steps": 3,
        "eval_steps": 3, "eval_batches": 2, "sample_tokens": 8, "log_steps": 1, "model.layers": 4, "model.width": 16,
        "model.heads": 2, "model.sequence_length": 16, "batch.size": 6, "batch.microbatches": 4,
        "optimizer.warmup_steps": 2, "save_total_limit": "null",
    }  # fmt: skip
    return ["train", *(f"--{key}={value}" for key, value in base.items()), *more]


def local(text: Path, output_dir: Path, *more: str) -> None:
    assert main(words(text, output_dir, "--local", *more)) == 0


class Fork:
    """``python -m pipeloom WORDS`` in a fork of this process, which has loaded torch; a new interpreter takes seconds.

    It has what the launcher needs of `subprocess.Popen`, so that the ranks of a fork are forks too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
        pass_fds: Sequence[int] = (),
        process_group: int | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        assert tuple(command[:3]) == (sys.executable, "-m", "pipeloom")
        self.returncode: int | None = None
        self.stdout, self.stderr = stdout, stderr
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            gc.freeze()  # objects of the parent are not this process's to finalize
            if process_group is not None:
                os.setpgid(0, process_group)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            files = [os.open(os.devnull, os.O_RDONLY), *(file.fileno() for file in (stdout, stderr) if file)]
            for descriptor, file in enumerate(files):
                os.dup2(file, descriptor)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            ranks_launcher.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL)  # type: ignore[misc]
            if first is not None:
                first()
            code = main(command[3:])
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float = 300.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"the run takes longer than {timeout} s"
            time.sleep(0.01)
        return self._wait(0)

    def _wait(self, options: int) -> Any:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode


def save_never_ends(step: int) -> None:
    """Make saving checkpoint-`step` take until the process is ended, with all its files written."""
    rename = os.rename

    def stuck(source: Any, target: Any, **more: Any) -> None:
        while str(target).endswith(f"checkpoint-{step}"):
            time.sleep(1)
        rename(source, target, **more)

    os.rename = stuck


@contextmanager
def started(
    words: Sequence[str], never_beyond: int | None = None, first: Callable[[], None] | None = None
) -> Iterator[Fork]:
    """A run of processes; one with `never_beyond` gets to saving the checkpoint of that step and no further.

    `first` is called in the process before anything else.
    """
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo
    command = [sys.executable, "-m", "pipeloom", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        if never_beyond is not None:
            first = partial(save_never_ends, never_beyond)
        process = Fork(command, stdout=out, stderr=errors, first=first)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)  # its ranks end with it
                process.wait()


def run(text: Path, output_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A run of processes, and what they print."""
    return launched(words(text, output_dir, *more))


def launched(words: Sequence[str], first: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    with started(words, first=first) as process:
        code = process.wait()
        return subprocess.CompletedProcess(words, code, printed(process.stdout), printed(process.stderr))


def under_torchrun(words: Sequence[str], *options: str, first: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    """``torchrun OPTIONS -m pipeloom WORDS``, and what it prints; torchrun and its ranks are forks of this process.

    `first` is called in torchrun's process before anything else.
    """

    def rank(*, args: Sequence[str], start_new_session: bool, **more: Any) -> Fork:
        command = [word for word in args if word != "-u"]
        return Fork(command, **more, first=os.setsid if start_new_session else None)

    def torchrun() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # torchrun may be about several machines, and asks for names
        subprocess_handler.Popen = rank  # type: ignore[misc, assignment]
        first()
        torch.distributed.run.main([*options, "-m", "pipeloom", *words])
        raise SystemExit(0)

    return launched(words, torchrun)


def printed(file: BinaryIO | None) -> str:
    assert file is not None
    file.seek(0)
    return file.read().decode()


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def metrics_so_far(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def story(output_dir: Path) -> list[tuple[Any, ...]]:
    """What must repeat to the last bit."""
    return [
        tuple(row.get(key) for key in ("step", "loss", "grad_norm", "lr", "eval_loss")) for row in metrics(output_dir)
    ]


def ranks_of(process: Fork) -> list[int]:
    """The process ids of a launcher's ranks, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def wait_for_steps(process: Fork, output_dir: Path, count: int) -> None:
    while len([row for row in metrics_so_far(output_dir) if "loss" in row]) < count:
        assert process.poll() is None, printed(process.stderr)
        time.sleep(0.005)
