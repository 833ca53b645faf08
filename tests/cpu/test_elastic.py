"""`pipeloom train --elastic`: fewer ranks after a loss, more again later; losses are those of the layout that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pipeloom.chaos.fault import VARIABLE, Fault, Order

from .train_runs import launched, local, metrics, story, text, words

__all__ = ["text"]

SMALL = ("--steps=8", "--save_steps=4", "--eval_batches=1", "--sample_tokens=0")


def losses(out: Path, first: int, last: int) -> list[tuple[object, ...]]:
    return [row for row in story(out) if first <= row[0] <= last]


@pytest.mark.parametrize(
    ("given", "fewer", "fault", "told", "step"),
    [
        ({"pipeline": 4}, ("--parallel.pipeline=3",), Fault(kind="kill", rank=2, at=36 * 5 + 3), "3 ranks", 4),
        (
            {"pipeline": 1, "data": 2},
            ("--parallel.data=1", "--batch.microbatches=4"),
            Fault(kind="kill", rank=1, at=7 * 5 + 3),
            "1 rank: parallel.pipeline=1, parallel.data=1, batch.microbatches=4",
            5,  # the other rank has its state
        ),
        (  # the peer of the lost rank has the state, and computes the micro-batches
            {"pipeline": 2, "data": 2},
            ("--parallel.data=1", "--parallel.replicas=2,1", "--batch.microbatches=4"),
            Fault(kind="kill", rank=3, at=13 * 5 + 3),
            "3 ranks: parallel.pipeline=2, parallel.replicas=2,1, batch.microbatches=4",
            5,
        ),
    ],
)
def test_a_run_goes_on_with_fewer_ranks_and_with_all_again(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, int],
    fewer: tuple[str, ...],
    fault: Fault,
    told: str,
    step: int,
) -> None:
    """A rank is killed in step 6: fewer go on from copies in memory, and all of them from where those save."""
    out, microbatches = tmp_path / "out", 4 // given.get("data", 1)
    layout = (*SMALL, *(f"--parallel.{name}={value}" for name, value in given.items()), "--eval_steps=1")
    layout = (*layout, f"--batch.microbatches={microbatches}")
    monkeypatch.setenv(VARIABLE, Order(str(tmp_path / "record"), fault).to_json())
    elastic = ("--elastic=true", "--copy_steps=2", "--regrow_seconds=0.001", f"--reroute={'replicas' in told}")
    done = launched(words(text, out, *layout, *elastic))
    assert done.returncode == 0, done.stderr
    copies = f"the copies in memory of step {step}"
    if "replicas" in told:  # in the processes that are left
        how, line = "the other ranks go on", rf"recovered: .* all ranks went back to {copies}; 1 step again"
    else:
        how, line = f"the run goes on from {copies}", f"goes on from {copies} with this layout; {6 - step} step"
    assert re.search(rf"was killed by SIGKILL .* in step 6.*; {how} with {told}", done.stderr), done.stderr
    assert re.search(rf"step {step}  {line}", done.stdout), done.stdout
    [grown] = map(int, re.findall(r"step (\d+)  saved \S+; more ranks go on", done.stdout))
    assert step < grown < 8
    steps = list(range(1, 9))
    assert [row["step"] for row in metrics(out) if "loss" in row] == steps
    assert [row["step"] for row in metrics(out) if "eval_loss" in row] == steps  # also where more ranks go on
    written = yaml.safe_load((out / "config.yaml").read_text())["parallel"]
    assert {name: written[name] for name in given} == given  # what was given, not what fits for now
    # The same layouts, one after another, from checkpoints of these steps.
    before = out / "checkpoint-4"
    if step > 4:
        local(text, tmp_path / "all", *layout, f"--resume_from_checkpoint={before}", f"--save_steps={step}")
        before = tmp_path / "all" / f"checkpoint-{step}"
        assert losses(out, 5, step) == losses(tmp_path / "all", 5, step)
    local(text, tmp_path / "fewer", *layout, *fewer, f"--resume_from_checkpoint={before}")
    local(text, tmp_path / "again", *layout, f"--resume_from_checkpoint={out / f'checkpoint-{grown}'}")
    assert losses(out, step + 1, grown) == losses(tmp_path / "fewer", step + 1, grown)
    assert losses(out, grown + 1, 8) == losses(tmp_path / "again", grown + 1, 8)
    if "data" in given:  # with the same stages and micro-batches, only the order of sums changes
        trained, unhurt = (
            [row[:3] for row in losses(each, 6, 8) if row[1] is not None] for each in (out, tmp_path / "all")
        )
        assert len(trained) == 3
        for row, expected in zip(trained, unhurt, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
