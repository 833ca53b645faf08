"""Signals that ask a run to end: it saves after the step in which they come, and a resumed run gives the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli import main
from pipeloom.data.sampler import Sampler
from pipeloom.processes.preemption import PREEMPTED, Preemption
from tests.cpu.train_runs import launched, local, printed, run, started, story, text, under_torchrun, words  # noqa: F401

BATCH = 6


def signalled(number: int, victim: str, rank: int, *, stuck: Path | None = None) -> None:
    """Rank `rank` gets, or its launcher, a signal while it reads the samples of step 5, and waits until it knows.

    With `stuck` it makes that file then, and no further progress.
    """
    held: list[Preemption] = []
    enter, batch = Preemption.__enter__, Sampler.batch

    def entered(self: Preemption) -> Preemption:
        held.append(self)
        return enter(self)

    def sampled(self: Sampler, start: int, size: int) -> Any:
        if start == 4 * BATCH and os.environ.get("RANK") == str(rank):
            os.kill(os.getppid() if victim == "parent" else os.getpid(), number)
            while not held[-1].asked:
                time.sleep(0.005)
            while stuck is not None:
                stuck.touch()
                time.sleep(0.05)
        return batch(self, start, size)

    Preemption.__enter__, Sampler.batch = entered, sampled  # type: ignore[method-assign]


CASES = {
    "launcher": (("--model.dropout=0.1",), signal.SIGTERM, "parent", 1),
    "rank of four": (("--parallel.pipeline=4",), signal.SIGUSR1, "rank", 2),
    "zero3": (
        ("--parallel.data=2", "--parallel.data_strategy=zero3", "--batch.microbatches=2"),
        signal.SIGTERM,
        "rank",
        3,
    ),
    "post-validation": (("--optimizer.barrier=false", "--eval_steps=4"), signal.SIGUSR1, "parent", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_last_bit(text: Path, tmp_path: Path, case: str) -> None:  # noqa: F811
    more, number, victim, rank = CASES[case]
    if "dropout" in more[0]:  # masks are drawn in each process
        assert run(text, tmp_path / "whole", *more).returncode == 0
    else:
        local(text, tmp_path / "whole", *more)
    out = tmp_path / "out"
    command = words(text, out, *more, "--resume_from_checkpoint=auto")
    with started(command, first=partial(signalled, number, victim, rank)) as process:
        assert process.wait() == PREEMPTED, printed(process.stderr)
        shown = printed(process.stdout)
    step = 6 if case == "post-validation" else 5  # whose update is final one step later
    assert f"step {step}  saved {out / f'checkpoint-{step}'}; pre-empted." in shown
    done = launched(command)
    assert done.returncode == 0, done.stderr
    assert f"from {out / f'checkpoint-{step}'}" in done.stdout
    assert story(out) == story(tmp_path / "whole")


def test_a_stream_drains_early_and_goes_on_to_the_last_bit(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its gradients are less stale after a drain: a run that drains at this step to save has the same bits."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    more = (
        "--schedule=pipedream",
        "--parallel.replicas=2,1",
        "--batch.microbatches=1",
        "--eval_steps=0",
        "--steps=120",
        "--sample_tokens=0",
    )
    command = words(text, out, *more, "--save_steps=0", "--resume_from_checkpoint=auto")
    with started(command, first=partial(signalled, signal.SIGUSR1, "rank", 0)) as process:
        assert process.wait() == PREEMPTED, printed(process.stderr)
    (saved,) = out.glob("checkpoint-*")
    step = int(saved.name.removeprefix("checkpoint-"))
    assert 5 < step < 120
    assert step % 2 == 0  # every stage has updated
    done = launched(command)
    assert done.returncode == 0, done.stderr
    first = words(text, whole, *more, f"--save_steps={step}", "--local")
    assert main([*first, "--resume_from_checkpoint=auto"]) == 0
    assert story(out)[:step] == story(whole)[:step]
    after = words(text, tmp_path / "other", *more, "--save_steps=0", "--local")
    assert main([*after, f"--resume_from_checkpoint={whole / saved.name}"]) == 0
    assert story(out)[step:] == story(tmp_path / "other")


def _is_late(line: str) -> bool:
    """Whether an error names rank 1, which hangs, and not the one that waits for it; and the signal that was sent."""
    late = "pipeloom: error: preempt_seconds=0.5: no checkpoint was complete so long after SIGTERM. "
    where = r"rank 1 is in step 5, .*at .*/test_preemption\.py:\d+ in sampled, without progress for \d+\.\d s"
    after = "; rank 0 waits for it. Earlier checkpoints are unchanged: resume from the latest one."
    return re.fullmatch(re.escape(late) + where + re.escape(after), line) is not None


@pytest.mark.parametrize("ended_by", ["time", "signal"])
def test_a_run_without_a_step_in_time_ends_and_keeps_its_checkpoint(
    text: Path,  # noqa: F811
    tmp_path: Path,
    ended_by: str,
) -> None:
    out = tmp_path / "out"
    seconds = 0.5 if ended_by == "time" else 300
    command = words(text, out, f"--preempt_seconds={seconds}")
    with started(command, first=partial(signalled, signal.SIGTERM, "parent", 1, stuck=tmp_path / "stuck")) as process:
        if ended_by == "signal":
            while process.poll() is None:
                time.sleep(0.2)
                if (tmp_path / "stuck").exists():
                    os.kill(process.pid, signal.SIGTERM)
        code, errors = process.wait(), printed(process.stderr)
    assert errors.count("\n") == 1, errors
    if ended_by == "time":
        assert code == 1
        assert _is_late(errors.removesuffix(" All ranks were ended.\n")), errors
    else:
        assert code == 128 + signal.SIGTERM
        assert "SIGTERM: all ranks were ended, in step 5" in errors
    assert [path.name for path in out.glob("*checkpoint-*")] == ["checkpoint-3"]


def test_a_run_of_torchrun_without_a_step_in_time_ends(text: Path, tmp_path: Path) -> None:  # noqa: F811
    first = partial(signalled, signal.SIGTERM, "parent", 1, stuck=tmp_path / "stuck")
    done = under_torchrun(words(text, tmp_path / "out", "--preempt_seconds=0.5"), "--nproc-per-node=2", first=first)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pipeloom: error: ")]
    assert _is_late(line), done.stderr


SECOND_SIGNALS = [  # under torchrun or not; U for SIGUSR1, T for SIGTERM; the exit code
    (False, "U", 0),  # behind the agreement of all ranks, in which another one had the signal first
    (False, "UU", 128 + signal.SIGUSR1),
    (False, "UT", 128 + signal.SIGTERM),
    (True, "UU", 0),  # from the scheduler, and passed on by the agent
    (True, "UT", 128 + signal.SIGTERM),
]
SIGNALLED = """
import os, signal, sys, time
from pipeloom.processes import preemption
preemption._REPEATED_SECONDS = 0.1
with preemption.Preemption(60.0, rank=0) as found:
    found.agree()
    for name in sys.argv[1]:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1 if name == "U" else signal.SIGTERM)
    time.sleep(0.3)
    assert found.asked
"""


def test_which_signal_is_the_second_one() -> None:
    """All cases at once: their processes mostly sleep."""
    place = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SIGNALLED, signals],
            env=place | ({"TORCHELASTIC_RUN_ID": "x"} if torchrun else {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for torchrun, signals, _ in SECOND_SIGNALS
    ]
    errors = [process.communicate()[1] for process in processes]
    for case, process, error in zip(SECOND_SIGNALS, processes, errors, strict=True):
        assert process.returncode == case[-1], (case, error)
        assert ("rank 0: ended by a second signal, SIG" in error) == (case[-1] != 0), (case, error)
