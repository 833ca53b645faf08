"""A checkpoint that is converted to a plan is what the plan's processes would have saved, and trains on alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipeloom as pl
from pipeloom.cli import checkpoint as cli
from pipeloom.cli.train import parse
from pipeloom.errors import CheckpointError, InputError
from pipeloom.parallel import run_threads
from pipeloom.train import checkpoint as ck
from pipeloom.train import run_checkpoints
from pipeloom.train.config.validate import validate
from pipeloom.train.process_group import join
from pipeloom.train.run_parts import RunParts

from .test_train import local, metrics, text, words

__all__ = ["text"]  # a fixture

STEP = 3
TINY = (
    "--steps=4",
    "--save_steps=3",
    "--eval_steps=0",
    "--sample_tokens=0",
    "--batch.size=8",
    "--batch.microbatches=2",
)
SAVED = {  # layouts to convert from
    "pipeline": ("--parallel.pipeline=2", "--optimizer.name=momentum"),
    "zero3 and tensor": (
        "--parallel.pipeline=1",
        "--parallel.data=2",
        "--parallel.data_strategy=zero3",
        "--parallel.tensor=2",
    ),
    "half": ("--parallel.pipeline=1", "--parallel.data=2", "--parallel.data_strategy=zero1", "--precision.dtype=bf16"),
}
PLANS: dict[str, dict[str, Any]] = {  # and to
    "one process": {"pipeline": 1},
    "pipeline": {"pipeline": 4, "schedule": "gpipe"},
    "zero2 and context": {"pipeline": 1, "data": 2, "data_strategy": "zero2", "context": 2},
    "zero3 in a pipeline": {"pipeline": 2, "data": 2, "data_strategy": "zero3", "data_granularity": "chunk"},
    "zero1 and tensor": {"pipeline": 1, "data": 2, "data_strategy": "zero1", "tensor": 2, "tensor_layout": "1d"},
}
PAIRS = [
    ("pipeline", "zero1 and tensor"),
    ("zero3 and tensor", "pipeline"),
    ("zero3 and tensor", "zero3 in a pipeline"),
    ("half", "one process"),
    ("half", "zero2 and context"),
]


@pytest.fixture(scope="module")
def saved(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("saved")
    for name, options in SAVED.items():
        local(text, home / name, *TINY, f"--steps={STEP}", *options)
    return {name: home / name / f"checkpoint-{STEP}" for name in SAVED}


def plan_file(directory: Path, name: str) -> Path:
    sizes = {"schedule": "1f1b", "microbatches": 2, **PLANS[name]}
    pl.Plan(**sizes).save(directory / "plan.json")
    return directory / "plan.json"


def given(name: str) -> list[str]:
    """The options of a saved run that are no plan's."""
    return [option for option in SAVED[name] if option.startswith(("--optimizer", "--precision"))]


def resaved(text: Path, path: Path, out: Path, *options: str) -> Path:
    """What the processes of a run save as soon as they have loaded a checkpoint."""
    config = parse(words(text, out, *TINY, "--local", *options)[1:])
    validate(config, world_size=None)

    def process() -> Path:
        with join(None, config) as group:
            run = RunParts(config, group)
            try:
                run_checkpoints.load(run, path)
                return run_checkpoints.save(run, STEP)
            finally:
                run.pipeline.close()

    return run_threads(config.num_threads, process)[0] if config.num_threads > 1 else process()


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_a_converted_checkpoint_is_what_the_plan_saves_and_trains_on_alike(
    layout: str, name: str, saved: dict[str, Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = plan_file(tmp_path, name), tmp_path / "converted"
    assert cli.main(["convert", str(saved[layout]), str(out), "--plan", str(plan)]) == 0
    printed = capsys.readouterr().out
    assert f"{out}/checkpoint-{STEP}: step {STEP}, " in printed
    assert f"--plan {plan} --output_dir {out} --resume_from_checkpoint latest" in printed
    ck.verify(out / f"checkpoint-{STEP}")
    options = [*given(layout), f"--plan={plan}"]
    ends = []
    for number, path in enumerate((saved[layout], out / f"checkpoint-{STEP}")):
        local(text, tmp_path / str(number), *TINY, *options, f"--resume_from_checkpoint={path}")
        ends.append([row["loss"] for row in metrics(tmp_path / str(number)) if row["step"] > STEP])
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    made = pl.Plan.load(plan)
    if made.data * made.tensor * made.context == 1:  # `--local` holds all ranks in one process
        return
    converted = ck.load(out)
    expected = ck.load(resaved(text, saved[layout], tmp_path / "expected", *options))
    assert converted.layout == expected.layout
    assert converted.num_parts == made.num_processes
    for part, other in zip(converted.manifest.parts, expected.manifest.parts, strict=True):
        for kind in ("pieces", "blocks", "optimizer_tensors", "optimizer_pieces", "optimizer_blocks", "block_states"):
            assert getattr(part, kind) == getattr(other, kind), kind
    files = [name for name in expected.manifest.files if not name.startswith("random")]
    assert all(converted.manifest.files[name] == expected.manifest.files[name] for name in files), "to the last byte"


def test_the_same_layout_keeps_random_states_and_ranks_have_files(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "same.json"
    pl.Plan(schedule="1f1b", pipeline=4, microbatches=2, cut=(1, 1, 1, 1)).save(plan)
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(["convert", str(saved["pipeline"]), str(first), "--plan", str(plan)]) == 0
    assert cli.main(["convert", str(first), str(second), "--plan", str(plan)]) == 0
    ends = [ck.load(each) for each in (first, second)]
    assert ends[0].manifest.files == ends[1].manifest.files
    assert [part.model for part in ends[0].manifest.parts] == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    assert ends[0].random(0, 4) is None, "the processes computed something else before"
    assert json.loads(json.dumps(ends[1].state["config"]))["parallel"]["cut"] == "1,1,1,1"


@pytest.mark.parametrize(
    ("more", "sizes", "error"),
    [
        (["--ranks", "2"], {}, "--ranks 2: does not work with --plan, which writes a whole checkpoint"),
        ([], {"pipeline": 5}, "parallel.pipeline=5: each stage needs a block, and model.layers=4"),
        ([], {"tensor": 3}, "parallel.tensor=3"),
        ([], {"cut": "time"}, "parallel.cut=time: times are measured by a run. Give blocks per stage"),
    ],
)
def test_refusals(more: list[str], sizes: dict[str, Any], error: str, saved: dict[str, Path], tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    pl.Plan(**{"schedule": "1f1b", "pipeline": 2, "microbatches": 2, **sizes}).save(plan)
    with pytest.raises((InputError, CheckpointError), match=error.replace(".", r"\.")):
        cli.main(["convert", str(saved["pipeline"]), str(out), "--plan", str(plan), *more])
    assert not out.exists(), "nothing is left"
