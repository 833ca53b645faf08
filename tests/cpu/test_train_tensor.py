"""`pipeloom train` with processes that share stages: tensor, sequence and context parallelism, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeloom.cli import checkpoint as cli
from pipeloom.plan.memory import read_memory
from pipeloom.train import checkpoint as ck

from .test_train_copies import assert_alike
from .test_train_resharding import forked
from .train_runs import local, metrics, metrics_so_far, story, text

__all__ = ["text"]  # a fixture

RUN = (
    *("--batch.size=8", "--batch.microbatches=2", "--steps=4", "--save_steps=2", "--eval_steps=2", "--sample_tokens=4"),
    *("--model.heads=4", "--model.width=32"),
)


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process."""
    output_dir = tmp_path_factory.mktemp("tensor") / "alone"
    local(text, output_dir, *RUN)
    return output_dir


def final(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = ck.load(directory)
    names = {name.partition("[")[0] for name in checkpoint.weight_map}
    return {name: checkpoint.tensor(name) for name in sorted(names)}


LAYOUTS = {
    "pp2-tp2": "--parallel.pipeline=2 --parallel.tensor=2",
    "tp2-dp2-sequence-zero2": "--parallel.pipeline=1 --parallel.tensor=2 --parallel.data=2 --parallel.sequence=true "
    "--parallel.data_strategy=zero2 --parallel.order=tp,dp,pp",
    "2d": "--parallel.pipeline=1 --parallel.tensor=4 --parallel.tensor_layout=2d",
    "pp2-cp2": "--parallel.pipeline=2 --parallel.context=2",
    "cp2-tp2-ulysses-zero3": "--parallel.pipeline=1 --parallel.context=2 --parallel.tensor=2 "
    "--parallel.context_kind=ulysses --parallel.data_strategy=zero3",
}


@pytest.mark.parametrize(  # of 2d, checkpoints go from layout to layout, below
    "layout", [pytest.param(each, marks=pytest.mark.whole_grid if each == "2d" else ()) for each in LAYOUTS]
)
def test_shared_stages_train_as_one_process(text: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    printed = forked(text, tmp_path / "out", *RUN, *LAYOUTS[layout].split())
    assert_alike(alone, tmp_path / "out", 1e-5)
    said, wanted = final(tmp_path / "out"), final(alone)
    assert said.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(said[name], value, rtol=1e-3, atol=1e-5), name
    rows = [row for row in metrics(tmp_path / "out") if "loss" in row]
    assert all(len(row["peak_memory_bytes"]) == 4 and 0 < row["bubble_fraction"] < 1 for row in rows)
    for row in read_memory(tmp_path / "out"):
        for kind, size in row.measured.items():
            if size is not None and kind != "peak":
                tolerance = 0.05 if kind == "activations" else 1e-3  # rows of rotary tables; empty parameters of zero3
                assert size == pytest.approx(row.predicted[kind], rel=tolerance, abs=64), (row.process, kind)
    assert printed.count("step 4/4") == 1, "one process prints"


STILL = ("--optimizer.learning_rate=0", "--optimizer.weight_decay=0", "--eval_steps=0", "--sample_tokens=0")


@pytest.mark.parametrize(
    "layout",
    ["pp2-tp2", *(pytest.param(each, marks=pytest.mark.whole_grid) for each in ("cp2-tp2-ulysses-zero3", "2d"))],
)
def test_threads_of_one_process_train_as_processes_do(text: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    options = LAYOUTS[layout].split()
    local(text, tmp_path / "out", *RUN, *options)
    assert_alike(alone, tmp_path / "out", 1e-5)
    for name, value in final(alone).items():
        assert torch.allclose(final(tmp_path / "out")[name], value, atol=1e-5), name
    local(text, tmp_path / "again", *RUN, *options, f"--resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-2'}")
    assert all(torch.equal(value, final(tmp_path / "out")[name]) for name, value in final(tmp_path / "again").items())


def test_checkpoints_go_from_layout_to_layout(text: Path, tmp_path: Path) -> None:
    """pp2 x tp2, one process, a grid, cp2 x tp2 with zero1, one process: tensors and states stay, to the last bit."""
    forked(text, tmp_path / "0", *RUN, "--steps=4", "--parallel.tensor=2")
    path = tmp_path / "0" / "checkpoint-4"
    assert json.loads((path / "manifest.json").read_text())["version"] == 3
    tensors = final(path)
    on = ("--parallel.pipeline=1", "--parallel.tensor=2", "--parallel.context=2", "--parallel.data_strategy=zero1")
    ways = [(), ("--parallel.pipeline=1", "--parallel.tensor=4", "--parallel.tensor_layout=2d"), on, ()]
    for number, way in enumerate(ways, 1):
        more = (*RUN, *STILL, f"--steps={4 + number}", f"--save_steps={4 + number}")
        start = local if not way else forked
        start(text, tmp_path / str(number), *more, *way, f"--resume_from_checkpoint={path}")
        path = tmp_path / str(number) / f"checkpoint-{4 + number}"
        assert json.loads((path / "manifest.json").read_text())["version"] == (3 if way else 2)
        for name, value in final(path).items():
            assert torch.equal(value, tensors[name]), (name, way)


DROPOUT = ("--model.dropout=0.1", "--steps=12", "--save_steps=4", "--eval_steps=4", "--sample_tokens=0")


def test_a_killed_run_goes_on_to_the_last_bit(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = (*RUN, *DROPOUT, "--parallel.pipeline=2", "--parallel.tensor=2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    forked(text, whole, *layout)
    forked(text, killed, *layout, kill_after=6)
    assert len([row for row in metrics_so_far(killed) if "loss" in row]) < 12, "the run was over before it was killed"
    found = ck.latest(killed)
    assert found is not None
    ck.verify(found)
    forked(text, killed, *layout, "--resume_from_checkpoint=latest")
    assert story(killed) == story(whole)
    ends = [ck.load(directory / "checkpoint-12") for directory in (killed, whole)]
    assert ends[0].manifest.files == ends[1].manifest.files, "every byte of model, optimizer and random states"
    capsys.readouterr()
    assert cli.main(["verify", str(whole)]) == 0
    assert cli.main(["ls", str(whole)]) == 0
    assert "tensor 2" in capsys.readouterr().out
    assert cli.main(["convert", str(whole), str(tmp_path / "exported")]) == 0


def test_dropout_masks_are_equal_on_tensor_parallel_ranks(text: Path, tmp_path: Path) -> None:
    """Masks are drawn whole and cut: tensor-parallel ranks with the generator of one process lose as it does."""
    more = (
        *RUN,
        "--model.dropout=0.2",
        "--parallel.pipeline=1",
        "--steps=4",
        "--sample_tokens=0",
        "--parallel.slices=1",
    )
    local(text, tmp_path / "alone", *more)
    forked(text, tmp_path / "out", *more, "--parallel.tensor=4")
    assert_alike(tmp_path / "alone", tmp_path / "out", 1e-5)
