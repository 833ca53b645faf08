"""`pipeloom train` with schedules that update while they run."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from pipeloom.cli import main
from pipeloom.common.quantities import counted
from pipeloom.sim import Timeline
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.optimizers import make_optimizer
from pipeloom.train.output.display import display
from pipeloom.train.process_group import join
from pipeloom.train.trainer import Trainer

from . import stream_reference
from .stream_reference import Made, Rule
from .train_runs import (
    STEP_KEYS,
    local,
    metrics,
    metrics_so_far,
    run,
    started,
    story,
    text,
    wait_for_steps,
    words,
)

__all__ = ["text"]  # a fixture

STREAMS = {
    "stash": ("--schedule=pipedream", "--batch.microbatches=1"),
    "vertical": (
        "--schedule=pipedream", "--weights=vertical", "--batch.microbatches=1", "--parallel.pipeline=3",
        "--save_steps=9", "--eval_steps=9",
    ),
    "2bw": ("--schedule=pipedream-2bw", "--batch.microbatches=3", "--parallel.pipeline=4"),
    "replicas": (
        "--schedule=pipedream", "--parallel.replicas=2,1", "--batch.microbatches=1", "--steps=8", "--save_steps=8",
        "--eval_steps=8",
    ),
}  # fmt: skip
VERSIONS = {"stash": [2, 1], "vertical": [3, 3, 3], "2bw": [2, 2, 2, 2], "replicas": [2, 2, 1]}


@pytest.mark.parametrize("name", STREAMS)
def test_processes_and_one_process_train_alike(text: Path, tmp_path: Path, name: str) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    local(text, one, *STREAMS[name])
    done = run(text, many, *STREAMS[name])
    assert done.returncode == 0, done.stderr
    assert story(one) == story(many)
    rows = [row for row in metrics(many) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    for row in rows:
        assert set(row) == STEP_KEYS | {"weight_versions"}
        assert row["step_seconds"] > 0
        assert 0 <= row["bubble_fraction"] < 1
        assert 0 <= row["predicted_bubble_fraction"] < 1
    assert [max(row["weight_versions"][rank] for row in rows) for rank in range(len(VERSIONS[name]))] == VERSIONS[name]
    found = json.loads((many / "timelines.json").read_text())
    measured, predicted = (Timeline.from_json(json.dumps(found[kind])) for kind in ("measured", "predicted"))
    assert measured.schedule.orders == predicted.schedule.orders
    lines = done.stdout.splitlines()
    assert [sum(line.startswith(f"step {row['step']}/") for line in lines) for row in rows] == [1] * len(rows)


def test_a_killed_stream_goes_on_to_the_last_bit(text: Path, tmp_path: Path) -> None:
    """It drains for every checkpoint, so there is nothing in flight to be saved."""
    more = (
        "--schedule=pipedream",
        "--batch.microbatches=1",
        "--model.dropout=0.1",
        "--steps=30",
        "--eval_steps=7",
        "--save_steps=5",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(text, whole, *more, "--sample_tokens=0")  # processes too: each rank draws its own dropout masks
    assert done.returncode == 0, done.stderr
    with started(words(text, killed, *more, "--sample_tokens=0"), never_beyond=20) as process:
        wait_for_steps(process, killed, 10)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    last = len([row for row in metrics_so_far(killed) if "loss" in row])
    assert 10 <= last < 30, "the run was over before it was killed"
    resumed = run(text, killed, *more, "--sample_tokens=0", "--resume_from_checkpoint", "latest")
    assert resumed.returncode == 0, resumed.stderr
    assert [row[:4] for row in story(killed)] == [row[:4] for row in story(whole)]


def asked_rate(batch: int, largest: float, num_steps: int = 12, warmup_steps: int = 3, least: float = 0.1) -> float:
    """Linear warm-up, then half a cosine from the largest rate to a tenth of it."""
    if batch < warmup_steps:
        return largest * (batch + 1) / warmup_steps
    progress = (batch - warmup_steps) / (num_steps - 1 - warmup_steps)
    return largest * (least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2)


def factor(rule: Rule, made: Made, staleness: str, scaled: bool) -> float:
    """What the papers multiply the rate by: PipeDream for replicas, 1511.05950 and 1910.05124 for late gradients."""
    factor = made.num_batches / rule.interval(0) if scaled else 1.0
    if staleness == "inverse":
        return factor / max(made.delay, 1)
    if made.delay and staleness != "none":
        return factor / made.delay ** (1 - min(made.update / int(staleness.removeprefix("pipemare:")), 1))
    return factor


def updates_of(rule: Rule, stage: int, num_batches: int, drained: tuple[int, ...]) -> list[Made]:
    """All updates of a stage in a training that drains behind so many batches; micro-batches are batches."""
    found, interval = [], rule.interval(stage)
    for first, end in pairwise((0, *drained, num_batches)):
        for update in range((end - first) // interval):
            held = range(update * interval, (update + 1) * interval)
            delay = update - min(rule.version(stage, b) for b in held)
            found.append(Made(stage, first // interval + update, first + held.stop - 1, interval, delay))
    return found


@pytest.mark.parametrize(
    ("weights", "replicas", "staleness", "scaled"),
    [("stash", (1, 1, 1), "inverse", False), ("vertical", (1, 2), "pipemare:7", True), ("stash", (2, 1), "none", True)],
)
def test_every_group_has_its_own_rate_at_every_update(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, replicas: tuple[int, ...],
    staleness: str, scaled: bool,
) -> None:  # fmt: skip
    """Of Muon's parameters and of AdamW's: warm-up and cosine of the batch, over the delay, times the replicas."""
    names: dict[nn.Parameter, str] = {}
    met: dict[nn.Parameter, list[float]] = {}

    def make(parameters: Iterable[tuple[str, nn.Parameter]], *options: Any) -> torch.optim.Optimizer:
        names.update({parameter: name for name, parameter in parameters})
        optimizer = make_optimizer(((name, parameter) for parameter, name in names.items()), *options)

        def note(made: torch.optim.Optimizer, *_: Any) -> None:
            for group in made.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        met.setdefault(parameter, []).append(group["lr"])

        optimizer.register_step_pre_hook(note)
        return optimizer

    monkeypatch.setattr("pipeloom.train.run_model.make_optimizer", make)
    local(
        text, tmp_path, "--schedule=pipedream", "--batch.microbatches=1", f"--weights={weights}",
        f"--model.layers={len(replicas)}", f"--parallel.pipeline={len(replicas)}", "--steps=12",
        f"--parallel.replicas={','.join(map(str, replicas))}",
        "--eval_steps=0", "--save_steps=8", "--sample_tokens=0", "--optimizer.name=muon", "--optimizer.warmup_steps=3",
        "--optimizer.learning_rate=0.003", "--optimizer.muon_learning_rate=0.04", f"--optimizer.staleness={staleness}",
        f"--optimizer.replica_scaling={str(scaled).lower()}",
    )  # fmt: skip
    rule = Rule(weights, replicas)
    assert met.keys() == names.keys()
    for parameter, name in names.items():
        hidden = name.startswith("blocks.") and parameter.ndim == 2
        block = name.split(".")[1] if name.startswith("blocks.") else 0 if name.startswith("embedding") else -1
        stage = range(len(replicas))[int(block)]
        expected = [
            asked_rate(made.batch, 0.04 if hidden else 0.003) * factor(rule, made, staleness, scaled)
            for made in updates_of(rule, stage, 12, drained=(8,))
        ]
        assert met[parameter] == pytest.approx(expected, rel=1e-12), name


def test_a_gpt_trains_as_one_process_does_with_late_gradients(text: Path, tmp_path: Path) -> None:
    """To the last bit: losses and weights, with rates that follow the batch and the delay, and gradients clipped."""
    config = TrainConfig.from_mapping({
        "schedule": "pipedream", "steps": 12, "output_dir": str(tmp_path), "local": True, "batch": {"size": 3},
        "data": {"path": str(text)}, "model": {"layers": 3, "width": 16, "heads": 2, "sequence_length": 16},
        "parallel": {"pipeline": 3}, "optimizer": {"warmup_steps": 3, "clip_norm": 0.5, "staleness": "inverse"},
    })  # fmt: skip
    rule = Rule("stash", (1, 1, 1))

    def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        decay, without = ([p for p in parameters if (p.ndim == 2) is matrices] for matrices in (True, False))
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": without, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    with join(None, config) as group, Trainer(config, group, None) as trainer:
        windows = [trainer.run.sampler.batch(3 * batch, 3) for batch in range(12)]
        expected = stream_reference.train(
            trainer.run.stages.modules, rule, [trainer.run.samples.batch(found, 1) for found in windows],
            lambda output, targets: nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten().long()),
            adamw, max_norm=0.5 / math.sqrt(3),
            learning_rate=lambda made: asked_rate(made.batch, 0.002) * factor(rule, made, "inverse", scaled=False),
        )  # fmt: skip
        with display(shown=False, num_steps=12, done=0, log_steps=1) as shown:
            assert [row["loss"] for row in trainer.steps(1, 12, shown)] == expected.losses
        found = [parameter for stage in trainer.run.stages.modules for parameter in stage.parameters()]
    for parameter, wanted in zip(found, expected.parameters.values(), strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--schedule=pipedream --parallel.replicas=2,1 --batch.microbatches=1",
            "steps=9: must be a multiple of 2: with parallel.replicas=2,1",
        ),
        (
            "--schedule=pipedream --parallel.replicas=2,1,1",
            "parallel.replicas=2,1,1: must have one number for each of 2 stages",
        ),
        ("--schedule=pipedream --parallel.replicas=two", ": must be ranks per stage, such as 2,1."),
        (
            "--schedule=gpipe --parallel.replicas=999999999,1",
            "parallel.replicas=999999999,1: schedule 'gpipe' has one rank per stage",
        ),
        ("--schedule=1f1b --weights=vertical", "weights"),
        (
            "--schedule=1f1b --parallel.in_flight=full",
            "parallel.in_flight=full: has no effect with schedule '1f1b', which is synchronous",
        ),
        ("--schedule=1f1b --optimizer.staleness=inverse", "a synchronous schedule has no stale gradients"),
        ("--schedule=pipedream --optimizer.staleness=pipemare", "pipemare:K"),
        ("--schedule=pipedream --optimizer.barrier=false", "has no barrier"),
        ("--schedule=pipedream --model.tie_embeddings", "model.tie_embeddings=true: does not work with schedule"),
        (
            "--schedule=pipedream-2bw --batch.microbatches=1 --parallel.pipeline=4",
            "Use 3. Set it as `--batch.microbatches`, and `--batch.size` at least as large.",
        ),
        (
            "--schedule=pipedream --parallel.replicas=999999999,1",
            "parallel.replicas=999999999,1: the least common multiple is 999999999",
        ),
        (f"--schedule=pipedream --parallel.replicas={'9' * 5000},1", ": must be ranks per stage, such as 2,1."),
    ],
)
def test_what_a_stream_cannot_be_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(words(text, tmp_path / "out", *options.split())) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_micro_batches_are_what_the_schedule_wants_unless_they_are_given(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [word for word in words(text, tmp_path / "out", "--local", "--steps=2") if "microbatches" not in word]
    for more, expected in (([], 6), (["--schedule=pipedream"], 1), (["--schedule=pipedream", "--batch.size=9"], 1)):
        assert main([*base, *more]) == 0
        assert f", {counted(expected, 'micro-batch')} per step" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["batch"]["microbatches"] is None


def test_of_a_long_stream_the_last_records_are_enough(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks keep so many records, which is of different micro-batches on each."""
    monkeypatch.setattr("pipeloom.training.stream.stream_rank._NUM_RECORDS", 60)
    more = ("--schedule=pipedream", "--batch.microbatches=1", "--parallel.pipeline=3", "--steps=40")
    local(text, tmp_path, *more, "--eval_steps=0", "--save_steps=0")
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    seconds = [row["step_seconds"] for row in rows]
    assert all(value > 1e-6 for value in seconds)
    found = json.loads((tmp_path / "timelines.json").read_text())
    measured, predicted = (Timeline.from_json(json.dumps(found[kind])) for kind in ("measured", "predicted"))
    assert 3 < measured.num_microbatches < 20
    assert measured.schedule.orders == predicted.schedule.orders
    assert all(min(live for _, live in points) >= 0 for points in measured.memory)


def test_a_stream_that_fails_has_written_the_losses_that_were_known(text: Path, tmp_path: Path) -> None:
    more = ("--schedule=pipedream", "--optimizer.learning_rate=1e30", "--optimizer.clip_norm=0", "--eval_steps=0")
    assert main(words(text, tmp_path, "--local", *more, "--save_steps=0")) == 1
    rows = metrics(tmp_path)
    assert rows[0]["step"] == 1
    assert rows[0]["loss"] is not None
    assert all(row["loss"] is None or "grad_norm" not in row for row in rows)


def test_a_stream_does_not_go_on_between_its_drains(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--schedule=pipedream", "--batch.microbatches=1")
    local(text, tmp_path / "odd", *more, "--steps=3")
    source = f"--resume_from_checkpoint={tmp_path / 'odd' / 'checkpoint-3'}"
    replicas = ("--parallel.replicas=2,1", "--steps=8", "--eval_steps=2", "--save_steps=2")
    assert main(words(text, tmp_path / "out", *more, *replicas, source)) == 2
    assert "is after step 3" in capsys.readouterr().err


def test_a_stream_from_a_file_is_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "import pipeloom as pl\n\n"
        "def mine(num_ranks, num_microbatches):\n"
        "    return pl.schedules.pipedream(num_ranks=num_ranks, num_microbatches=num_microbatches)\n"
    )
    assert main(words(text, tmp_path / "out", f"--schedule={tmp_path / 'own.py'}:mine")) == 2
    assert "updates the parameters while it runs" in capsys.readouterr().err
