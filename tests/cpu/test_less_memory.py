"""Recomputation and offload together with copies of the pipeline, and in `pipeloom train`."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.plan.memory import read_memory
from pipeloom.sim import Timeline
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens

from .train_runs import STEP_KEYS, local, metrics, ranks_of, run, started, story, text, wait_for_steps, words

__all__ = ["text"]  # a fixture

CASES = [
    ("ddp", None, "1f1b", "fp32"),
    ("zero1", None, "zb-h1", "bf16"),
    ("zero3", "step", "zb-v", "fp32"),
    ("zero3", "chunk", "bfs", "bf16"),
    ("zero3", "microbatch", "zb-h1", "fp32"),
    ("zero3", "microbatch", "interleaved", "bf16"),
]


def _steps(mesh: pl.Mesh, case: tuple, directory: str | None, recompute: str) -> list[float]:
    """Losses of three steps; with a directory, states and activations go there."""
    strategy, granularity, name, precision = case
    model = make_gpt(tied=True, layers=2 if name in ("1f1b", "zb-h1") else 4)
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    offload = pl.OffloadActivations(f"disk:{directory}", least_bytes=64, beside=0) if directory else None
    data = pl.DataParallel(strategy, granularity) if granularity else pl.DataParallel(strategy)
    options = {"mesh": mesh, "data": data, "precision": precision, "recompute": recompute, "offload": offload}
    with pl.Pipeline(model, schedule, loss_fn=language_loss, transport="torch", **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if directory:
            optimizer = pl.OffloadedOptimizer(optimizer, f"disk:{directory}", portion_bytes=2000, least_bytes=64)
        losses = []
        for _ in range(3):
            x, y = tokens(16)
            half = slice(0, 8) if mesh.coordinate("dp") == 0 else slice(8, 16)
            losses.append(pipe.step(x[half], y[half]).item())
            pl.clip_grad_norm(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if directory:
            assert optimizer.moved_bytes > 0
            optimizer.close()
        return losses


def _compare(rank: int, directory: str, whole_grid: bool) -> None:
    mesh = pl.Mesh(pp=2, dp=2)
    ways = ((directory, "full"), (None, "full"), (directory, "none"))
    for turn, case in enumerate(CASES):
        expected = _steps(mesh, case, None, "none")
        assert expected[-1] < expected[0]
        for where, recompute in ways if whole_grid else ways[turn % 3 :][:1]:
            assert _steps(mesh, case, where, recompute) == expected, (case, where, recompute)


@pytest.mark.parametrize("whole_grid", [False, pytest.param(True, marks=pytest.mark.whole_grid)])
def test_with_copies_losses_are_bitwise_those_without(tmp_path: Path, whole_grid: bool) -> None:
    """Offload with recomputation, or either alone; whole grids have all three for each case."""
    run_ranks(_compare, 4, str(tmp_path), whole_grid)
    assert not list(tmp_path.iterdir())


OFFLOAD_KEYS = {
    "offloaded_state_bytes", "offloaded_parameter_bytes", "offload_moved_bytes", "offload_wait_seconds",
}  # fmt: skip
ZERO3 = ["--parallel.data_strategy=zero3", "--parallel.data_granularity=microbatch"]
PARAMETERS = ["--memory.offload_parameters=true", *ZERO3]


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    local(text, out)
    return out


def _away(directory: Path) -> list[str]:
    directory.mkdir(exist_ok=True)
    return ["--memory.recompute=full,none", f"--memory.offload=disk:{directory}", "--memory.offload_activations=0"]


def test_what_moves_take_is_measured_and_predicted(text: Path, tmp_path: Path) -> None:
    few = ["--steps=3", "--save_steps=0", "--eval_steps=0", "--sample_tokens=0", "--schedule=gpipe"]
    local(text, tmp_path / "out", *few, *_away(tmp_path / "place"))
    timelines = json.loads((tmp_path / "out" / "timelines.json").read_text())
    for kind in ("measured", "predicted"):
        rank = Timeline.from_json(json.dumps(timelines[kind])).background[0]
        assert {span.action.op for span in rank if span.end > span.start} == {pl.Op.OFFLOAD, pl.Op.RELOAD}


def test_a_run_with_less_memory_is_the_same_run(text: Path, plain: Path, tmp_path: Path) -> None:
    """In processes; its checkpoints are those of the run without, and both go on from either."""
    out, place = tmp_path / "out", tmp_path / "place"
    done = run(text, out, *_away(place), *PARAMETERS)
    assert done.returncode == 0, done.stderr
    assert story(out) == story(plain)
    rows = [row for row in metrics(out) if "loss" in row]
    assert all(set(row) == STEP_KEYS | OFFLOAD_KEYS for row in rows)
    assert rows[-1]["offloaded_state_bytes"] > 0
    assert rows[-1]["offloaded_parameter_bytes"] == 4 * (4 * (12 * 16**2 + 2 * 16) + 2 * 256 * 16 + 16)
    moved = [row["offload_moved_bytes"] for row in rows]
    assert moved == sorted(moved)
    assert moved[-1] > 0
    one, other = tmp_path / "one", tmp_path / "other"
    parameters_alone = [f"--memory.offload=disk:{place}", "--memory.offload_states=false", *PARAMETERS]
    local(text, one, *parameters_alone, f"--resume_from_checkpoint={plain / 'checkpoint-3'}")
    local(text, other, f"--resume_from_checkpoint={out / 'checkpoint-3'}")
    assert story(one) == story(other) == [row for row in story(plain) if row[0] > 3]
    assert not list(place.iterdir())


@pytest.mark.parametrize("optimizer", ["muon", "momentum"])
def test_other_optimizers(text: Path, tmp_path: Path, optimizer: str) -> None:
    shorter = ["--steps=4", "--save_steps=0", "--eval_steps=0", "--sample_tokens=0", f"--optimizer.name={optimizer}"]
    local(text, tmp_path / "one", *shorter)
    local(text, tmp_path / "other", *shorter, *_away(tmp_path / "place"))
    assert story(tmp_path / "one") == story(tmp_path / "other")


def test_a_stream_offloads_states(text: Path, tmp_path: Path) -> None:
    stream = ["--schedule=pipedream", "--batch.microbatches=1", "--sample_tokens=0"]
    local(text, tmp_path / "one", *stream)
    away = [word for word in _away(tmp_path / "place") if "activations" not in word]
    local(text, tmp_path / "other", *stream, *away)
    assert story(tmp_path / "one") == story(tmp_path / "other")


def test_a_killed_run_leaves_no_file_and_goes_on(text: Path, tmp_path: Path) -> None:
    out, place = tmp_path / "out", tmp_path / "place"
    long = ["--steps=100000", "--eval_steps=0", *_away(place), *PARAMETERS]
    with started(words(text, out, *long)) as process:
        wait_for_steps(process, out, 4)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        process.wait()
    assert not list(place.iterdir())
    last = max(row["step"] for row in metrics(out) if row) // 3 * 3
    local(text, out, f"--steps={last + 3}", "--resume_from_checkpoint=latest", *_away(place))
    assert metrics(out)[-1]["step"] == last + 3


def test_a_disk_that_fills_up_is_one_line_and_the_last_checkpoint_goes_on(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, place = tmp_path / "out", tmp_path / "place"
    write = os.pwritev

    def full(*arguments) -> int:
        if (out / "metrics.jsonl").exists() and len(metrics(out)) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert main(words(text, out, "--local", *_away(place), *PARAMETERS)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error
    assert not list(place.iterdir())
    local(text, out, *_away(place), *PARAMETERS, "--resume_from_checkpoint=latest")
    assert story(out) == story(plain)


def test_a_disk_without_room_is_told_before_the_first_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(words(text, tmp_path / "out", "--local", "--model.width=64", *_away(tmp_path / "place"))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ": no space for" in error
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--memory.cap=1KiB"], "cap=1024 bytes (1 KiB): rank 1 needs at least"),
        (["--memory.cap=1QB"], "--memory.cap=1QB: must be a size in bytes, such as 8e9"),
        (["--memory.recompute=most"], "recompute='most': must be none, selective, full"),
        (["--memory.recompute=full,none,none"], "recompute='full,none,none': has 3 values for 2 stages. Use one value"),
        (["--memory.offload=floppy"], "must be `cpu`, or `disk:PATH`"),
        (["--memory.offload=disk:/no/such/place"], "No such file or directory"),
        (
            ["--memory.offload_activations=2"],
            "memory.offload_activations=2: no offload target is configured. Add --memory.offload",
        ),
        (["--memory.offload_activations=0"], "memory.offload_activations=0: no offload target is configured. Add"),
        (["--memory.offload_parameters=true"], "memory.offload_parameters=true: no offload target is configured. Add"),
        (
            ["--memory.offload_parameters=true", "--memory.offload=cpu"],
            "memory.offload_parameters=true: with ddp in fp32, every forward reads the parameters",
        ),
        (
            ["--memory.offload=cpu", *PARAMETERS, "--memory.offload_states=false", "--optimizer.barrier=false"],
            "nor offloaded parameters. Remove optimizer.barrier, or memory.offload_parameters",
        ),
        (
            ["--memory.offload=cpu", *PARAMETERS, "--schedule=pipedream", "--batch.microbatches=1"],
            "memory.offload_parameters=true: does not work with asynchronous schedule",
        ),
        (
            ["--memory.offload=cpu", "--memory.offload_activations=-1"],
            "memory.offload_activations=-1: must be at least 0",
        ),
        (
            ["--memory.offload=cpu", "--optimizer.barrier=false"],
            "optimizer.barrier=false: does not work with offloaded optimizer states",
        ),
        (["--memory.offload=cpu", "--memory.offload_activations=1", "--schedule=zb-h1"], "Raise the cap"),
        (
            [
                "--memory.offload=cpu",
                "--memory.offload_activations=1",
                "--schedule=pipedream",
                "--batch.microbatches=1",
            ],
            "activation offload needs a synchronous schedule, because the weight versions",
        ),
    ],
)
def test_what_means_nothing_is_refused(text: Path, tmp_path: Path, capsys, options: list[str], expected: str) -> None:
    assert main(words(text, tmp_path / "out", *options)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error
    assert not (tmp_path / "out").exists()


def test_a_cap_chooses_recomputation_and_the_run_stays_the_same(
    text: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (both,) = (row.predicted["peak"] for row in read_memory(plain))  # ranks, in one process
    local(text, out, f"--memory.cap={0.45 * both}")
    found = yaml.safe_load((out / "config.yaml").read_text())["memory"]
    assert found["cap"] is None
    assert "full" in found["recompute"]
    assert f"under memory.cap: --memory.recompute {found['recompute']}\n" in capsys.readouterr().out
    assert story(out) == story(plain)
    assert [row.predicted["peak"] <= 0.9 * both for row in read_memory(out)] == [True]


def test_host_memory_of_a_run_on_cpus_is_said_to_move_nothing(text: Path, plain: Path, tmp_path: Path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this run would compute on a GPU")
    local(text, tmp_path / "out", "--memory.offload=cpu", "--memory.offload_activations=0")
    assert capsys.readouterr().out.count("memory.offload=cpu: has no effect, because this run computes on the CPU") == 1
    assert story(tmp_path / "out") == story(plain)
