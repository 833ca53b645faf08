"""`pipeloom train` end to end on a tiny model: what it writes, that layouts agree, that resuming is exact."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeloom.chaos.fault import VARIABLE, Fault, Order
from pipeloom.cli import main
from pipeloom.processes import launcher
from pipeloom.sim import Timeline
from pipeloom.train.checkpoint import verify

from .train_runs import (
    STEP_KEYS,
    local,
    metrics,
    metrics_so_far,
    printed,
    ranks_of,
    run,
    started,
    story,
    text,
    under_torchrun,
    wait_for_steps,
    words,
)  # fmt: skip

__all__ = ["text"]  # a fixture


@pytest.fixture(scope="session")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a tiny run of two processes that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("runs") / "reference"
    done = run(text, output_dir)
    assert done.returncode == 0, done.stderr
    (output_dir / "stdout").write_text(done.stdout)
    return output_dir


def test_a_run_writes_what_it_promises(reference: Path) -> None:
    rows = metrics(reference)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 10))
    assert all(set(row) == STEP_KEYS for row in steps)
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6, 9]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(len(row["peak_memory_bytes"]) == 2 for row in steps)
    assert all(row["live_activations"] == [2, 1] for row in steps)
    assert all(0 <= row["bubble_fraction"] < 1 and 0 <= row["predicted_bubble_fraction"] < 1 for row in steps)
    assert {path.name for path in reference.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6", "checkpoint-9"}
    assert yaml.safe_load((reference / "config.yaml").read_text())["model"]["width"] == 16
    trace = json.loads(gzip.decompress((reference / "timeline.json.gz").read_bytes()))
    assert trace["traceEvents"]
    assert "<svg" in (reference / "report.html").read_text()
    timelines = json.loads((reference / "timelines.json").read_text())
    assert [timelines[kind]["kind"] for kind in ("measured", "predicted")] == ["measured", "simulated"]


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "dualpipev"])
def test_the_report_has_any_schedule_measured_and_predicted(text: Path, tmp_path: Path, schedule: str) -> None:
    """Chunks, split backwards, overlapped pairs: the same computations, all with a time, and all memory freed."""
    local(text, tmp_path, f"--schedule={schedule}", "--steps=2", "--batch.size=4", "--save_steps=0", "--eval_steps=0")
    found = json.loads((tmp_path / "timelines.json").read_text())
    measured, predicted = (Timeline.from_json(json.dumps(found[kind])) for kind in ("measured", "predicted"))
    assert measured.schedule.orders == predicted.schedule.orders
    assert measured.overlapped == predicted.overlapped
    assert measured.peak_activations == predicted.peak_activations
    for timeline in (measured, predicted):
        assert all(points[-1][1] == 0 for points in timeline.memory)
        assert all(span.end > span.start for row in timeline.compute_spans for span in row)


def test_a_run_says_what_it_does_in_plain_lines(reference: Path) -> None:
    lines = (reference / "stdout").read_text().splitlines()
    step = next(line for line in lines if line.startswith("step 9/9"))
    for part in ("loss", "grad norm", "tokens/s", "bubble", "predicted", "memory"):
        assert part in step
    assert any("validation loss" in line for line in lines)
    sample = lines.index("sample:")
    assert lines[sample + 1].startswith("def ")
    assert "\x1b" not in "".join(lines[:sample])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_layouts_train_alike_to_the_last_bit(text: Path, reference: Path, tmp_path: Path, ranks: int) -> None:
    local(text, tmp_path / "out", "--parallel.pipeline", str(ranks))
    assert story(tmp_path / "out") == story(reference)


def test_slices_train_alike_however_they_are_cut(text: Path, reference: Path, tmp_path: Path) -> None:
    expected = [row["loss"] for row in metrics(reference) if "loss" in row]
    short = ("--eval_steps=0", "--save_steps=0", "--sample_tokens=0")
    for number, slices in enumerate(("4", "7,5,3,1")):
        local(text, tmp_path / str(number), f"--parallel.slices={slices}", *(short if number else ()))
        rows = metrics(tmp_path / str(number))
        assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(expected, rel=1e-5)
        assert all(0 < row["predicted_bubble_fraction"] < 1 for row in rows if "loss" in row)


def test_measured_slices_are_kept_by_the_run_that_goes_on(text: Path, tmp_path: Path) -> None:
    more = ("--parallel.slices=auto", "--steps=4", "--model.sequence_length=32", "--eval_steps=0", "--sample_tokens=0")
    done = run(text, tmp_path / "out", *more)
    assert done.returncode == 0, done.stderr
    slices = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["parallel"]["slices"]
    assert slices == 1 or sum(map(int, slices.split(","))) == 32
    assert re.search(r"slices [\d,]+: predicted .* per step, .* without", done.stdout)
    before = story(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    done = run(text, tmp_path / "out", *more, "--resume_from_checkpoint=latest")
    assert done.returncode == 0, done.stderr
    assert f"slices {slices}, as in " in done.stdout
    assert story(tmp_path / "out") == before


def test_torch_messages_and_an_uneven_cut_train_alike_to_the_last_bit(
    text: Path, reference: Path, tmp_path: Path
) -> None:
    more = ("--parallel.transport", "torch", "--parallel.cut", "3,1", "--schedule", "gpipe")
    done = run(text, tmp_path / "out", *more)
    assert done.returncode == 0, done.stderr
    assert story(tmp_path / "out") == story(reference)


def _kill_once() -> None:
    """Rank 0 of the first attempt is killed when checkpoint-6 is in place."""
    rename = os.rename

    def last(source: Any, target: Any, **more: Any) -> None:
        rename(source, target, **more)
        if str(target).endswith("checkpoint-6") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = last


def test_torchrun_starts_a_run_again_that_goes_on_to_the_last_bit(text: Path, reference: Path, tmp_path: Path) -> None:
    more = ("--resume_from_checkpoint=auto", "--parallel.data=-1")  # of two processes, two ranks are one replica
    options = ("--standalone", "--max-restarts=1", "--nproc-per-node=2")
    done = under_torchrun(words(text, tmp_path / "out", *more), *options, first=_kill_once)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-6\n" in done.stdout  # where the second attempt began
    assert done.stdout.count("step 9/9") == 1
    assert story(tmp_path / "out") == story(reference)
    assert not list((tmp_path / "out").glob("previous-*"))


def test_one_launched_rank_trains_alike_to_the_last_bit(text: Path, reference: Path, tmp_path: Path) -> None:
    done = run(text, tmp_path / "out", "--parallel.pipeline=1")
    assert done.returncode == 0, done.stderr
    assert story(tmp_path / "out") == story(reference)


def test_the_config_repeats_the_run_and_keeps_the_earlier_one(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    local(text, out)
    first = story(out)
    assert main(["train", "--config", str(out / "config.yaml")]) == 0
    assert story(out) == first
    assert story(out / "previous-1") == first
    assert (out / "previous-1" / "checkpoint-9").is_dir()
    assert len(list(out.glob("checkpoint-*"))) == 3


DROPOUT = ["--model.dropout=0.1", "--steps=16", "--save_steps=5", "--eval_steps=11", "--sample_tokens=0"]


@pytest.fixture(scope="session")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run with dropout, where the random states count."""
    output_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run(text, output_dir, *DROPOUT)
    assert done.returncode == 0, done.stderr
    return output_dir


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_killed_run_goes_on_to_the_last_bit(text: Path, whole: Path, tmp_path: Path, victim: str) -> None:
    """The kill comes somewhere behind the first checkpoint, and before the run is over, however late it comes."""
    killed = tmp_path / "killed"
    with started(words(text, killed, *DROPOUT), never_beyond=10) as process:
        wait_for_steps(process, killed, 7)
        os.kill(process.pid if victim == "launcher" else ranks_of(process)[1], signal.SIGKILL)
        process.wait()
    last = len([row for row in metrics_so_far(killed) if "loss" in row])
    assert 7 <= last < 16, "the run was over before it was killed"
    resumed = run(text, killed, *DROPOUT, "--resume_from_checkpoint", "latest")
    assert resumed.returncode == 0, resumed.stderr
    assert story(killed) == story(whole)
    assert not list(killed.glob("previous-*"))


def test_a_killed_rank_is_started_again_and_all_go_on_to_the_last_bit(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which writes the metrics, is killed in step 10; each step has 16 actions."""
    order = Order(str(tmp_path / "record"), Fault(kind="kill", rank=0, at=16 * 9 + 5))
    monkeypatch.setenv(VARIABLE, order.to_json())
    done = run(text, tmp_path / "out", *DROPOUT, "--recover", "--copy_steps=4")
    assert done.returncode == 0, done.stderr
    # Rank 1 knows that step 10 had begun: it is the same process.
    assert re.search(
        r"\nstep 8  recovered: rank 0 was killed by SIGKILL .* in step 10, last action 0.*; all ranks went back to the "
        r"copies in memory of step 8; 2 steps again, [\d.]+ s\n",
        done.stdout,
    ), done.stdout
    assert story(tmp_path / "out") == story(whole)


def test_a_limit_of_file_sizes_in_a_save_names_the_rank_of_a_replica(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit also holds for the file of the store, into which torch writes when a process group is destroyed."""
    order = Order(str(tmp_path / "record"), Fault(kind="full-disk", rank=1, at=2, limit_bytes=20))
    monkeypatch.setenv(VARIABLE, order.to_json())
    done = run(text, tmp_path / "out", "--parallel.pipeline=1", "--parallel.data=2", "--batch.size=8")
    assert done.returncode == 1
    assert re.search(
        r"^pipeloom: error: rank 0 of replica 1 failed in checkpoint after step 3, last action \S+: the checkpoint was "
        r"not saved: rank 1: \S+safetensors: File too large\. Free disk space.* All ranks were ended\.\n\Z",
        done.stderr,
    ), done.stderr


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGINT, "launcher"), (signal.SIGKILL, "rank")])
def test_a_run_that_ends_in_a_save_leaves_nothing_of_it(
    text: Path, tmp_path: Path, number: signal.Signals, victim: str
) -> None:
    out = tmp_path / "out"
    with started(words(text, out, "--save_steps=1", "--eval_steps=0"), never_beyond=2) as process:
        while not list(out.glob(".checkpoint-2.partial-*/manifest.json.sha256")):
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid if victim == "launcher" else ranks_of(process)[1], number)
        process.wait()
    assert [path.name for path in out.glob("*checkpoint-*")] == ["checkpoint-1"]
    assert verify(out / "checkpoint-1").step == 1


def test_what_a_killed_run_left_of_a_save_is_cleaned_up_by_the_next(text: Path, tmp_path: Path) -> None:
    """Also where it saves nothing, and goes on from nothing."""
    local(text, tmp_path, "--steps=1", "--eval_steps=0", "--sample_tokens=0")
    (tmp_path / "checkpoint-1").rename(tmp_path / ".checkpoint-1.old-0123abcd")  # in the middle of being replaced
    (tmp_path / ".checkpoint-2.partial-0123abcd").mkdir()
    local(text, tmp_path, "--steps=1", "--save_steps=0", "--eval_steps=0", "--sample_tokens=0")
    assert not list(tmp_path.glob("*checkpoint-*"))
    assert verify(tmp_path / "previous-1" / "checkpoint-1").step == 1


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(text: Path, reference: Path, tmp_path: Path) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    local(
        text, one, "--parallel.pipeline=1", f"--resume_from_checkpoint={reference / 'checkpoint-3'}", "--save_steps=6"
    )
    assert story(one) == [row for row in story(reference) if row[0] > 3]
    done = run(text, four, "--parallel.pipeline=4", f"--resume_from_checkpoint={one / 'checkpoint-6'}")
    assert done.returncode == 0, done.stderr
    assert story(four) == [row for row in story(reference) if row[0] > 6]


def test_resuming_drops_what_came_after_the_checkpoint(text: Path, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')  # as a kill leaves it
    local(text, out, f"--resume_from_checkpoint={out / 'checkpoint-3'}")
    assert story(out) == story(reference)
    assert {path.name for path in (out / "previous-1").iterdir()} == {"checkpoint-6", "checkpoint-9"}


def test_a_lower_save_total_limit_counts_checkpoints_that_are_there(
    text: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    for steps, kept in ((15, {12, 15}), (18, {15, 18})):
        capsys.readouterr()
        local(
            text, out, "--resume_from_checkpoint=latest", f"--steps={steps}", "--save_total_limit=2", "--eval_steps=0"
        )
        said = capsys.readouterr().out
        assert ("save_total_limit all -> 2" in said) == (steps == 15)
        assert ("the next save deletes all checkpoints but the newest 2" in said) == (steps == 15)
        assert {path.name for path in out.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in kept}


def test_auto_begins_a_run_and_goes_on_with_it(text: Path, reference: Path, tmp_path: Path) -> None:
    out, auto = tmp_path / "out", "--resume_from_checkpoint=auto"
    local(text, out, auto)
    assert story(out) == story(reference)
    shutil.rmtree(out / "checkpoint-9")
    local(text, out, auto)
    assert story(out) == story(reference)
    assert not list(out.glob("previous-*"))


def test_a_finished_run_that_is_resumed_stays_as_it_was(text: Path, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    local(text, out, "--resume_from_checkpoint=latest")
    assert story(out) == story(reference)


def test_measured_cuts_and_learned_positions_train(text: Path, tmp_path: Path) -> None:
    done = run(text, tmp_path / "processes", "--steps=2", "--parallel.cut=time")
    assert done.returncode == 0, done.stderr
    local(text, tmp_path / "here", "--steps=2", "--parallel.cut=parameters", "--model.positions=learned")


def test_tied_embeddings_stay_tied_over_processes(text: Path, tmp_path: Path) -> None:
    processes, alone = tmp_path / "processes", tmp_path / "alone"
    done = run(text, processes, "--model.tie_embeddings")
    assert done.returncode == 0, done.stderr
    local(text, alone, "--model.tie_embeddings", "--parallel.pipeline=1")
    for one, other in zip(story(processes), story(alone), strict=True):
        for here, there in zip(one, other, strict=True):  # the tied matrix's two gradients add up in another order
            assert here == pytest.approx(there, rel=1e-4) if here is not None else there is None
    resumed = tmp_path / "resumed"
    local(text, resumed, "--model.tie_embeddings", f"--resume_from_checkpoint={processes / 'checkpoint-6'}")
    assert story(resumed) == [row for row in story(processes) if row[0] > 6]


def test_a_killed_rank_ends_the_run_and_is_named(text: Path, tmp_path: Path) -> None:
    """No process is left: the fixture of all tests looks for them."""
    long = ("--steps=100000", "--eval_steps=0", "--parallel.pipeline=4")
    with started(words(text, tmp_path / "out", *long)) as process:
        wait_for_steps(process, tmp_path / "out", 3)
        second = run(text, tmp_path / "out")
        assert (second.returncode, second.stdout) == (2, "")
        assert "is in use by another run" in second.stderr
        os.kill(ranks_of(process)[2], signal.SIGKILL)
        assert process.wait() == 1
        line = printed(process.stderr)
    assert line.count("\n") == 1, line
    assert "pipeloom: error: rank 2 was killed by SIGKILL" in line
    assert " step " in line
    assert "last action 2" in line


def test_a_loss_that_is_not_finite_is_shown_and_ends_the_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--optimizer.learning_rate=1e30", "--optimizer.clip_norm=0", "--save_steps=0"]
    assert main(words(text, tmp_path / "out", "--local", *more)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "training cannot continue" in error
    last = metrics(tmp_path / "out")[-1]  # strict JSON, the number is null
    assert None in (last["loss"], last["grad_norm"])


def test_a_damaged_checkpoint_is_refused_before_any_rank_starts(
    text: Path,
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    damaged = tmp_path / "checkpoint-9"
    shutil.copytree(reference / "checkpoint-9", damaged)
    resumed = words(text, tmp_path / "out", f"--resume_from_checkpoint={damaged}")
    for file in sorted(damaged.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert main(resumed) == 2, file
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert said.out == ""
        file.write_bytes(content)
    assert main([*resumed, "--model.width=32"]) == 2
    error = capsys.readouterr().err
    assert "model.width=32: checkpoint " in error
    assert "checkpoint-9 has 16; both must be equal. Change the option" in error
