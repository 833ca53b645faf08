"""Metrics that loss_fn returns beside the loss: combined over micro-batches, slices, replicas and context parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import RunError
from tests.cpu.auxiliary_model import make_batch, make_model, mse
from tests.cpu.ranks import run_ranks

BATCHES = [make_batch(10), make_batch(7, seed=1)]  # of two replicas
PLAIN = ("plain",) * 4


def loss_fn(output: Tensor, target: Tensor) -> dict[str, Any]:
    wide = target[..., 0] > 0.3  # of some tokens, as labels that count
    return {
        "loss": mse(output, target),
        "error": (output - target).abs().mean(),
        "tokens": pl.Sum(target[..., 0].numel()),
        "wide": pl.Sum(wide.sum()),
        "error_of_wide": pl.Mean((output - target)[wide].abs().mean(), wide.sum()),
    }


def whole(batches: list[tuple[Tensor, Tensor]], model: nn.Module | None = None) -> dict[str, float]:
    """Of all samples at once."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        found = loss_fn((model or make_model(PLAIN))(inputs), targets)
    values = {name: getattr(value, "value", value) for name, value in found.items() if name != "loss"}
    return {name: float(value) for name, value in values.items()}


def schedule_of(name: str, **sizes: int) -> pl.Schedule:
    return pl.schedules.build(name, **{"num_ranks": 2, "num_microbatches": 4, **sizes})


def compare(pipe: pl.Pipeline, batches: list[tuple[Tensor, Tensor]], own: int = 0) -> None:
    expected = pytest.approx(whole(batches), rel=1e-12)
    pipe.step(*batches[own])
    assert pipe.metrics() == expected
    assert all(type(value) is float for value in pipe.metrics().values())
    pipe.evaluate(*batches[own])
    assert pipe.metrics() == expected


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("1f1b", {}, {"transport": "threads"}),
        ("zb-h1", {}, {"recompute": "full"}),
        ("dualpipev", {}, {"recompute": "selective"}),
        ("chimera", {}, {"transport": "threads"}),
        ("seq1f1b", {"num_slices": 3}, {}),
        ("interleaved", {"num_chunks": 2}, {"recompute": "full"}),
    ],
)
def test_metrics_are_those_of_all_samples(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    with pl.Pipeline(make_model(PLAIN), schedule_of(name, **sizes), loss_fn=loss_fn, **options) as pipe:
        compare(pipe, BATCHES[:1])
        assert pipe.observations().keys() == {"0", "1", "2", "3"}


def replicas(name: str, **options: Any) -> Callable[[int], None]:
    """A step of two replicas with batches of different sizes."""

    def work(rank: int) -> None:
        with (
            pl.Mesh(pp=2, dp=2) as mesh,
            pl.Pipeline(make_model(PLAIN), schedule_of(name), loss_fn=loss_fn, mesh=mesh, **options) as pipe,
        ):
            compare(pipe, BATCHES, mesh.coordinate("dp"))

    return work


@pytest.mark.parametrize(("name", "data"), [("1f1b", "ddp"), ("zb-v", "zero3")])
def test_replicas(name: str, data: str) -> None:
    work = replicas(name, data=data)
    pl.run_threads(4, lambda: work(0), timeout_seconds=120)


def _in_a_process(rank: int) -> None:
    replicas("zb-h1", data="zero1")(rank)


def test_in_processes() -> None:
    run_ranks(_in_a_process, 4)


def test_context_parallel_ranks() -> None:
    def work() -> None:
        with (
            pl.Mesh(pp=2, cp=2) as mesh,
            pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=loss_fn, mesh=mesh) as pipe,
        ):
            inputs, targets = (torch.cat([part, part[:, :2]], 1) for part in BATCHES[0])  # 8 tokens
            expected = pytest.approx(whole([(inputs, targets)]), rel=1e-12)
            pipe.step(inputs, targets)
            assert pipe.metrics() == expected

    pl.run_threads(4, work, timeout_seconds=120)


def test_the_loss_scale_does_not_apply() -> None:
    with pl.Pipeline(make_model(PLAIN).float(), schedule_of("1f1b"), loss_fn=loss_fn, precision="fp16") as pipe:
        pipe.loss_scale = 1024.0
        pipe.step(*(part.float() for part in BATCHES[0]))
        assert pipe.metrics() == pytest.approx(whole(BATCHES[:1]), rel=2e-2)


def test_repeated_warm_ups_count_once() -> None:
    with pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=loss_fn, transport="threads") as pipe:
        stepper = pl.PostValidatedStep(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), max_norm=1.0)
        for step in range(4):
            stepper.step(*make_batch(10, seed=step))
            assert pipe.metrics()["tokens"] == 60
        stepper.settle()
        assert sum(stepper.num_rollbacks.values()) > 0


def test_streams_report_them_per_batch() -> None:
    schedule = schedule_of("pipedream-2bw", num_microbatches=4)
    with pl.Pipeline(make_model(PLAIN), schedule, loss_fn=loss_fn) as pipe:
        stream = pl.Stream(pipe, torch.optim.SGD(pipe.parameters(), lr=0.0))
        updates = stream.run([BATCHES[0], BATCHES[1]])
    for update, batch in zip(updates, BATCHES, strict=True):
        assert update.metrics == pytest.approx(whole([batch]), rel=1e-12)


def test_the_loss_and_gradients_are_those_without_metrics() -> None:
    """Metrics have no graph, and what is not reported of an earlier step goes."""
    with pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=mse) as pipe:
        expected = pipe.step(*BATCHES[0])
        gradients = [parameter.grad for parameter in pipe.parameters()]
        assert pipe.metrics() == {}
    names = iter(["a", "b"])
    state = {"name": next(names)}

    def one(output: Tensor, target: Tensor) -> dict[str, Any]:
        value = output.sum()
        return {"loss": mse(output, target), state["name"]: value, "nothing": pl.Mean(value / 0, 0)}

    with pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=one) as pipe:
        assert torch.equal(pipe.step(*BATCHES[0]), expected)
        for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert pipe.metrics().keys() == {"a", "nothing"}
        assert math.isnan(pipe.metrics()["nothing"])
        state["name"] = next(names)
        pipe.evaluate(*BATCHES[0])
        assert pipe.metrics().keys() == {"b", "nothing"}


def _changing() -> Callable[[Tensor, Tensor], dict[str, Any]]:
    names = chain("a", repeat("b"))
    return lambda output, target: {"loss": mse(output, target), next(names): 1.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda o, t: {"error": mse(o, t)}, "returned a dict with 'error': the loss that is trained must be under"),
        (
            lambda o, t: {"loss": mse(o, t), "x": o},
            r"returned 'x': a torch.float64 of shape \(3, 6, 8\): a metric must",
        ),
        (lambda o, t: {"loss": mse(o, t), "x": "high"}, "returned 'x': 'high': a metric must be a real number"),
        (lambda o, t: {"loss": mse(o, t), 1: 2.0}, "a metric named 1: must be a string"),
        (lambda o, t: {"loss": o}, r"returned \(3, 6, 8\): it must return a scalar"),
        (_changing(), r"metrics \['a'\] for one micro-batch and \['b'\] for another, which differ in 'a'"),
    ],
)
def test_wrong_results_are_one_line(function: Any, message: str) -> None:
    with pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=function) as pipe:
        with pytest.raises(RunError, match=message) as caught:
            pipe.step(*BATCHES[0])
        assert "\n" not in str(caught.value)
        with pytest.raises(RunError):
            pipe.step(*BATCHES[0])


def test_check_and_measured_cuts_take_such_a_loss() -> None:
    with pl.Pipeline(make_model(PLAIN), schedule_of("1f1b"), loss_fn=loss_fn, check=BATCHES[0]):
        pass
    pl.split.split(make_model(PLAIN), 2, cut="time", sample=BATCHES[0], loss_fn=loss_fn)
