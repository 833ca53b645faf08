"""`pipeloom train --report_to`: metrics go to TensorBoard, wandb and trackio, each step once, also over a resume."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeloom import cli

# A module that records calls of its functions, as lines of JSON, in place of wandb and trackio.
RECORDER = """
import json, os
from pathlib import Path

def record(*row):
    with Path(os.environ["RECORDED"]).open("a") as file:
        file.write(json.dumps([__name__, *row]) + "\\n")

def init(**given):
    given["config"] = sorted(given["config"])
    record("init", given)

def log(numbers, step=None):
    record("log", step, numbers)

def finish():
    record("finish")
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("wandb", "trackio"):
        (modules / f"{name}.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    yield tmp_path / "recorded"
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def train(directory: Path, *more: str) -> int:
    text = directory / "text.txt"
    draw = random.Random(1)
    text.write_text(" ".join(draw.choice(["the", "loom", "weaves", "micro", "batches"]) for _ in range(400)))
    options = {
        "data.path": text,
        "data.validation_fraction": 0.3,
        "output_dir": directory / "run",
        "sample_tokens": 0,
        "model.layers": 2,
        "model.width": 8,
        "model.heads": 2,
        "model.sequence_length": 8,
        "batch.size": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_batches": 1,
        "parallel.pipeline": 2,
        "batch.microbatches": 2,
    }
    return cli.main(["train", "--local", *(f"--{name}={value}" for name, value in options.items()), *more])


def rows(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_runs_are_reported_once_per_step_and_go_on(tmp_path: Path, recorded: Path) -> None:
    both = "--report_to=wandb,trackio"
    assert train(tmp_path, both, "--steps=3") == 0
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    assert train(tmp_path, both, "--steps=4", f"--resume_from_checkpoint={checkpoint}") == 0
    calls = [json.loads(line) for line in recorded.read_text().splitlines()]
    for name in ("wandb", "trackio"):
        own = [call[1:] for call in calls if call[0] == name]
        (first, second) = (given for kind, *given in own if kind == "init")
        assert first == second
        assert first[0]["resume"] == "allow"
        assert first[0]["project"] == ("mine" if name == "wandb" else "pipeloom")
        logged = [(step, "eval_loss" in numbers) for kind, *(step, numbers) in (c for c in own if c[0] == "log")]
        assert logged == [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]
        assert [call for call in own if call[0] == "finish"] == [["finish"]] * 2
        last = next(numbers for kind, *(step, numbers) in (c for c in own if c[0] == "log") if step == 4)
        written = next(row for row in rows(tmp_path) if row["step"] == 4)
        assert last["loss"] == written["loss"]
        memory = written["peak_memory_bytes"]
        assert [last[f"peak_memory_bytes/{process}"] for process in range(len(memory))] == memory
    # a new run in the same directory is another run
    assert train(tmp_path, both, "--steps=1") == 0
    again = [json.loads(line) for line in recorded.read_text().splitlines() if '"init"' in line]
    assert len({call[2]["name"] for call in again}) == 2


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the extra 'tensorboard')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path, "--report_to=tensorboard", "--steps=3") == 0
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    assert train(tmp_path, "--report_to=tensorboard", "--steps=4", f"--resume_from_checkpoint={checkpoint}") == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    expected = {row["step"]: row["loss"] for row in rows(tmp_path) if "loss" in row}
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert found == pytest.approx(expected, rel=1e-6)
    assert {"grad_norm", "lr", "eval_loss", "peak_memory_bytes/0"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("mlflow", "report_to='mlflow': must be names of tensorboard, wandb, trackio, or none."),
        ("none,trackio", "report_to=trackio: trackio is not installed. Run pip install 'pipeloom[trackio]'."),
    ],
)
def test_an_unknown_or_missing_package_is_one_line(
    names: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, f"--report_to={names}") == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
