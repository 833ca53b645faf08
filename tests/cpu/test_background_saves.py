"""Checkpoints that are written while training goes on: bitwise those of the step, and their errors are survived."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeloom.cli import main
from pipeloom.train.checkpoint import OptimizerState, writer
from pipeloom.train.checkpoint.manifest import verify
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.output import saves
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.saves import HostCopies, Saves, _Save
from tests.cpu.train_runs import local, metrics_so_far, run, story, text, words  # noqa: F401

BACKGROUND = "--background_saves=true"


@pytest.fixture(scope="module")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run that stops while it saves."""
    out = tmp_path_factory.mktemp("reference")
    local(text, out)
    return out


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, but random generators, by kind and name."""
    verify(checkpoint)
    files = sorted(path for path in checkpoint.glob("*.safetensors") if not path.name.startswith("random"))
    return {f"{path.name.split('-')[0]} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def assert_same(checkpoint: Path, other: Path) -> None:
    found, expected = tensors(checkpoint), tensors(other)
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer") for name in found)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(
    text: Path,  # noqa: F811
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = _Save._run
    late = []

    def later(self: _Save) -> None:
        while self.step < 9 and len([row for row in metrics_so_far(tmp_path) if "loss" in row]) < self.step + 2:
            time.sleep(0.001)
        late.append(self.step)
        write(self)

    monkeypatch.setattr(_Save, "_run", later)
    local(text, tmp_path, BACKGROUND)
    assert late == [3, 6, 9]
    assert story(tmp_path) == story(reference)
    for step in late:
        assert_same(tmp_path / f"checkpoint-{step}", reference / f"checkpoint-{step}")


def test_ranks_save_in_the_background(text: Path, reference: Path, tmp_path: Path) -> None:  # noqa: F811
    done = run(text, tmp_path, BACKGROUND)
    assert done.returncode == 0, done.stderr
    for step in (3, 6, 9):
        assert f"step {step}  saved {tmp_path / f'checkpoint-{step}'}" in done.stdout
        assert_same(tmp_path / f"checkpoint-{step}", reference / f"checkpoint-{step}")
    assert story(tmp_path) == story(reference)
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_the_save_of_the_last_step_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a recovery makes it, behind the steps."""
    given = {"model": {"weight": torch.ones(3)}, "optimizer": OptimizerState("SGD")}
    monkeypatch.setattr(saves, "contents", lambda _: given)
    config = TrainConfig(background_saves=True, steps=6)
    run: Any = SimpleNamespace(
        config=config, group=SimpleNamespace(size=1), journal=Journal(None, None), output_dir=tmp_path
    )
    own = Saves(run)
    assert list(own.save(3)) == []
    assert list(own.save(6)) == [f"step {step}  saved {tmp_path}/checkpoint-{step}" for step in (3, 6)]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose next saves fail as on a full disk."""
    steps: list[int] = []
    rename = writer.put_in_place

    def full(partial: Path, output_dir: Path, step: int) -> Path:
        if step in steps:
            steps.remove(step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
        return rename(partial, output_dir, step)

    monkeypatch.setattr(writer, "put_in_place", full)
    return steps


def test_a_failed_save_is_told_and_the_next_one_tries_again(
    text: Path,  # noqa: F811
    reference: Path,
    tmp_path: Path,
    failing: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing += [3, 9]
    local(text, tmp_path, BACKGROUND)
    shown = capsys.readouterr().out.splitlines()
    for step in (3, 9):
        (line,) = [line for line in shown if line.startswith(f"step {step}  the checkpoint was not saved")]
        assert "No space left on device" in line
        assert line.endswith("Training goes on, and the next save tries again.")
    names = sorted(path.name for path in tmp_path.glob("*checkpoint-*"))
    assert names == ["checkpoint-6", "checkpoint-9"]  # of the last step, in a second try
    assert_same(tmp_path / "checkpoint-9", reference / "checkpoint-9")


@pytest.mark.parametrize("polled", [True, False])  # without: the next save reports the failure of the one before
@pytest.mark.parametrize("last", [False, True])
def test_too_many_failed_saves_end_the_run_unless_the_next_one_succeeds(
    text: Path,  # noqa: F811
    tmp_path: Path,
    failing: list[int],
    capsys: pytest.CaptureFixture[str],
    last: bool,
    polled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not polled:
        monkeypatch.setattr(saves.Saves, "poll", lambda _: [])
    failing += [3, 6, 9] if last else [3, 6]
    command = words(text, tmp_path, "--local", BACKGROUND, "--save_errors=1")
    assert main(command) == last
    shown = capsys.readouterr()
    told = [line for line in shown.out.splitlines() if "the checkpoint was not saved" in line]
    assert [line.rpartition("Training goes on, and ")[2] for line in told] == [
        "the next save tries again.",
        "with save_errors=1, the run ends if the next save fails.",
    ]
    assert ("the checkpoint was not saved: rank 0:" in shown.err) == last
    assert ("checkpoint-9" in shown.err) == last
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ([] if last else ["checkpoint-9"])


def test_copies_are_made_again_in_the_same_memory() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    model: dict[str, Tensor] = {"a": weight, "tied": weight, "b": weight[:, :1], "empty": torch.zeros(0)}
    state = OptimizerState("Adam", {"a": {"step": torch.tensor(1.0)}})
    given: dict[str, Any] = {"model": model, "optimizer": state, "state": {"x": 1}}
    copies = HostCopies()
    first = copies.of_contents(given)
    assert first["state"] == {"x": 1}
    assert first["model"]["a"] is first["model"]["tied"]
    weight += 1
    state.tensors["a"]["step"] += 1
    assert torch.equal(first["model"]["a"], torch.arange(6.0).reshape(2, 3))
    assert first["optimizer"].tensors["a"]["step"] == 1
    second = copies.of_contents(given)
    assert second["model"]["a"].data_ptr() == first["model"]["a"].data_ptr()
    assert torch.equal(second["model"]["b"], weight[:, :1])
    assert second["optimizer"].tensors["a"]["step"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--save_steps=0", BACKGROUND), "background_saves=true: has no effect without checkpoints"),
        (("--save_errors=2",), "save_errors=2: has no effect without background_saves"),
        ((BACKGROUND, "--memory.offload=disk:.", "--memory.offload_states=true"), "memory.offload is there to spare"),
        (
            (BACKGROUND, "--local", "--parallel.data=2", "--batch.microbatches=2"),
            "with --local, several ranks per stage are threads",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    more: tuple[str, ...],
    message: str,
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words(text, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
