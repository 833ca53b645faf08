"""Runs that go back to a checkpoint after a spike."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from pipeloom.cli import main
from pipeloom.data.sampler import Sampler
from pipeloom.errors import CheckpointError
from pipeloom.train import run_parts
from pipeloom.train.checkpoint.resume import Resumed
from pipeloom.train.data.samples import Samples
from pipeloom.train.output import rewinds
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.recent_band import RecentBand
from pipeloom.train.output.rewinds import Rewind, read_rewinds
from pipeloom.train.process_group import Group
from pipeloom.training import optimizer_step
from tests.cpu.train_runs import (  # noqa: F401
    launched,
    metrics,
    printed,
    save_never_ends,
    started,
    story,
    text,
    wait_for_steps,
    words,
)

REWIND = ("--eval_steps=0", "--sample_tokens=0", "--on_spike=rewind", "--model.dropout=0.1")


def test_samples_that_are_passed_over_are_no_part_of_the_order() -> None:
    whole = Sampler(10, 3).batch(0, 40)
    sampler = Sampler(10, 3, [(25, 27), (4, 9), (9, 12)])
    left = np.delete(whole, [*range(4, 12), 25, 26])
    assert sampler.passed_over == [(4, 12), (25, 27)]
    assert np.array_equal(sampler.batch(0, 30), left)
    assert all(np.array_equal(sampler.batch(n, 7), left[n : n + 7]) for n in range(20))
    assert [whole[sampler.position(n)[0]] for n in range(30)] == left.tolist()
    assert sampler.without([(0, 4)]).passed_over == [(0, 12), (25, 27)]


def test_a_restored_band_has_the_limits_of_the_saved_one() -> None:
    band, other = RecentBand(), RecentBand()
    for step in range(40):
        assert band.observe(5 - step / 40, 1 + step % 3 / 10) is None
    other.load(json.loads(json.dumps(band.state())))
    assert (found := band.observe(99.0, 99.0)) is not None
    assert other.observe(99.0, 99.0) == found


def spiking(*at: int) -> None:
    """Gradient norms are a thousandfold in these of the steps that this process makes, counted from 1."""
    norms, calls = optimizer_step.gradient_norms, [0]

    def measured(pipeline: Any) -> Any:
        calls[0] += 1
        return norms(pipeline) * (1000 if calls[0] in at else 1)

    optimizer_step.gradient_norms = measured  # type: ignore[assignment]


def stuck(step: int, *at: int) -> None:
    """Spikes in these steps, and the checkpoint of `step` is never finished."""
    spiking(*at)
    save_never_ends(step)


def never_sees(start: int, stop: int) -> None:
    """Every sampler leaves out the samples of these positions."""
    run_parts.Sampler = partial(Sampler, passed_over=[(start, stop)])  # type: ignore[misc, assignment]


def tensors(checkpoint: Path) -> dict[str, Any]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def test_a_run_that_went_back_and_was_killed_is_bitwise_one_that_never_saw_the_samples(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    options = (
        *REWIND, "--save_steps=20", "--steps=24", "--parallel.pipeline=1", "--parallel.data=2",
        "--parallel.data_strategy=zero1", "--batch.microbatches=2",
    )  # fmt: skip
    with started(words(text, out, *options), first=partial(stuck, 24, 22)) as process:
        wait_for_steps(process, out, 24)  # the spike in step 22, back to 20, and on to 24
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        shown = printed(process.stdout)
    assert f"; back to {out / 'checkpoint-20'}, passing over samples 121 to 132 (rewind 1 of at most 3)" in shown
    (recorded,) = read_rewinds(out)
    assert (recorded.checkpoint, recorded.step, recorded.start, recorded.stop) == (20, 22, 120, 132)
    before_kill = story(out)
    resumed = launched(words(text, out, *options, "--resume_from_checkpoint=auto"))
    assert resumed.returncode == 0, resumed.stderr
    with started(words(text, reference, *options), first=partial(never_sees, 120, 132)) as process:
        assert process.wait() == 0, printed(process.stderr)
    assert before_kill == story(out) == story(reference)
    found, expected = (tensors(directory / "checkpoint-24") for directory in (out, reference))
    assert found.keys() == expected.keys()
    assert [name for name in found if not found[name].equal(expected[name])] == []


def test_rewinds_end_where_every_step_has_a_spike(
    monkeypatch: pytest.MonkeyPatch,
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(optimizer_step, "gradient_norms", optimizer_step.gradient_norms)  # restored afterwards
    spiking(21, *range(24, 99))
    make, made = run_parts.RunParts.__init__, []

    def noted(parts: run_parts.RunParts, config: Any, group: Group, samples: Samples | None = None) -> None:
        made.append((samples is None, group.black_box.steps))
        make(parts, config, group, samples)

    monkeypatch.setattr(run_parts.RunParts, "__init__", noted)
    options = (*REWIND, "--local", "--save_steps=22", "--steps=30", "--spike_rewinds=2")
    assert main(words(text, tmp_path, *options)) == 1
    shown = capsys.readouterr()
    assert "step 21  gradient norm" in shown.out
    assert "; update left out, because this run has no checkpoint yet" in shown.out
    assert "passing over samples 133 to 144 (rewind 1 of at most 2)" in shown.out
    assert "passing over samples 145 to 150 (rewind 2 of at most 2)" in shown.out
    assert f"the run went back to {tmp_path / 'checkpoint-22'} 2 times, and spike_rewinds=2." in shown.err
    assert [(each.step, each.start, each.stop) for each in read_rewinds(tmp_path)] == [(24, 132, 144), (23, 144, 150)]
    assert [row["step"] for row in metrics(tmp_path)][-2:] == [22, 23]
    assert made == [(True, 0), (False, 0), (False, 0)]  # data is opened once, and first steps are patient


def test_a_rewind_passes_over_a_damaged_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(optimizer_step, "gradient_norms", optimizer_step.gradient_norms)  # restored afterwards
    spiking(24)
    find = rewinds.find_good

    def after_damage(*given: Any, **options: Any) -> Resumed | None:
        damaged = next((tmp_path / "checkpoint-22").glob("*.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:-1])
        return find(*given, **options)

    monkeypatch.setattr(rewinds, "find_good", after_damage)
    assert main(words(text, tmp_path, *REWIND, "--local", "--save_steps=11", "--steps=25", "--spike_rewinds=2")) == 0
    shown = capsys.readouterr()
    assert "It is passed over for checkpoint-11, and kept as checkpoint-22.damaged." in shown.out
    assert (
        f"; back to {tmp_path / 'checkpoint-11'}, passing over samples 67 to 144 (rewind 1 of at most 2)" in shown.out
    )
    assert shown.err == ""


def lost_twice(directory: Path) -> None:
    """A spike in step 21; rank 1 is killed once before step 22, and once before the report."""
    spiking(21)
    enter = Journal.enter

    def entered(self: Journal, phase: str, **patient: Any) -> None:
        note = directory / f"killed in {phase}"
        if os.environ.get("RANK") == "1" and phase in ("step 22", "report") and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        enter(self, phase, **patient)

    Journal.enter = entered  # type: ignore[method-assign]


def test_a_run_with_a_spike_before_its_first_checkpoint_recovers_from_there_and_reports(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    options = (*REWIND, "--save_steps=22", "--steps=22", "--recover", "--copy_steps=100")
    with started(words(text, out, *options), first=partial(lost_twice, tmp_path)) as process:
        assert process.wait() == 0, printed(process.stderr)
        shown = printed(process.stdout)
    assert "; update left out, because this run has no checkpoint yet" in shown
    assert "all ranks went back to the copies in memory of step 21; 1 step again" in shown
    assert re.search(r"step 22  recovered: rank 1 .*\nreport: ", shown), shown
    assert [row["step"] for row in metrics(out) if "loss" in row] == [*range(1, 23)]


def test_a_checkpoint_that_was_saved_after_a_rewind_knows_it() -> None:
    rewind = Rewind(checkpoint=20, step=22, spike="loss 9, limit 3", start=120, stop=132, num_windows=50, seed=1)
    sampler = {"num_windows": 50, "seed": 1, "samples_seen": 120}
    assert rewind.is_known_to({**sampler, "passed_over": [[4, 9], [120, 144]]})
    assert not rewind.is_known_to(sampler)
    assert not rewind.is_known_to({**sampler, "passed_over": [[120, 130]]})
    assert not rewind.is_known_to({**sampler, "seed": 2, "passed_over": [[120, 144]]})


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[{}]", '[{"step": 3}]'])
def test_damaged_records_of_rewinds_are_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "rewinds.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"rewinds\.json cannot be read \(.*it has the samples that this run"):
        read_rewinds(tmp_path)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--on_spike=rewind", "--save_steps=0"), "on_spike=rewind: goes back to a checkpoint, and save_steps=0 saves"),
        (("--spike_rewinds=5",), "spike_rewinds=5: has no effect with on_spike=warn. Remove it, or use rewind."),
    ],
)
def test_rewinds_need_checkpoints(
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    line: str,
) -> None:
    assert main(words(text, tmp_path / "out", "--local", *options)) == 2
    assert line in capsys.readouterr().err
