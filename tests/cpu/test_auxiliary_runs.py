"""Auxiliary losses with what else a run may have: context parallelism, 16 bits, offload, rollbacks, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pipeloom as pl
from pipeloom.engine.batch import Extent
from pipeloom.engine.binders import auxiliary, computations
from pipeloom.engine.rank_state import RankState
from pipeloom.errors import InputError, StageError
from pipeloom.transport.call_numbers import num_samples_of
from tests.cpu.auxiliary_model import F64, Counting, Expected, compare, make_batch, make_model, mse, plain_loop
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import Checkpointed

BATCHES = [make_batch(10), make_batch(7, seed=1)]  # of two replicas


@cache
def expected(replicas: int) -> Expected:
    return plain_loop(make_model(), BATCHES[:replicas], 4)


def schedule_of(name: str, **sizes: int) -> pl.Schedule:
    return pl.schedules.build(name, num_ranks=2, num_microbatches=4, **sizes)


def step_and_compare(name: str, replicas: int = 1, *, sizes: dict[str, int] | None = None, **options: Any) -> None:
    """In threads, two stages and `replicas` of them, or on loopback."""
    wanted, schedule = expected(replicas), schedule_of(name, **sizes or {})

    def work() -> None:
        with (
            pl.Mesh(pp=2, dp=replicas) as mesh,
            pl.Pipeline(make_model(layer=Counting), schedule, loss_fn=mse, mesh=mesh, **options) as pipe,
        ):
            compare(pipe, pipe.step(*BATCHES[mesh.coordinate("dp")]), wanted)

    if replicas > 1:
        pl.run_threads(2 * replicas, work, timeout_seconds=120)
    else:
        with pl.Pipeline(make_model(layer=Counting), schedule, loss_fn=mse, **options) as pipe:
            compare(pipe, pipe.step(*BATCHES[0]), wanted)


def _in_a_process(rank: int) -> None:
    with (
        pl.Mesh(pp=2, dp=2) as mesh,
        pl.Pipeline(
            make_model(layer=Counting), schedule_of("zb-h1"), loss_fn=mse, mesh=mesh, data="zero3", recompute="full"
        ) as pipe,
    ):
        compare(pipe, pipe.step(*BATCHES[mesh.coordinate("dp")]), expected(2))


def test_in_processes() -> None:
    expected(2)
    run_ranks(_in_a_process, 4)


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", "full"), ("zb-v", "none")])
def test_context_parallel_ranks(name: str, recompute: str) -> None:
    """Each has a part of every sequence; a value is the mean over its tokens."""
    wanted, schedule = expected(1), schedule_of(name)

    def work() -> None:
        with (
            pl.Mesh(pp=2, cp=2) as mesh,
            pl.Pipeline(
                make_model(layer=Counting), schedule, loss_fn=mse, mesh=mesh, context="ring-plain", recompute=recompute
            ) as pipe,
        ):
            compare(pipe, pipe.step(*BATCHES[0]), wanted)

    pl.run_threads(4, work, timeout_seconds=120)


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", "none"), ("zb-h1", "full")])
def test_offloaded_activations(name: str, recompute: str, tmp_path: Path) -> None:
    step_and_compare(name, recompute=recompute, offload=pl.OffloadActivations(f"disk:{tmp_path}", least_bytes=1))


def test_units_gathered_for_every_microbatch() -> None:
    step_and_compare("1f1b", 2, data=pl.DataParallel("zero3", granularity="microbatch"))


def test_the_loss_scale_applies_to_auxiliary_losses() -> None:
    with pl.Pipeline(make_model().float(), schedule_of("zb-h1"), loss_fn=mse, precision="fp16") as pipe:
        pipe.loss_scale = 1024.0
        pipe.step(*(part.float() for part in BATCHES[0]))
        for name, parameter in pipe.named_parameters():
            wanted = expected(1).gradients.get(name)
            if wanted is not None:
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.double(), wanted, rtol=2e-2, atol=2e-3)


def test_steps_add_up_and_evaluation_trains_nothing() -> None:
    wanted = expected(1)
    with pl.Pipeline(make_model(layer=Counting), schedule_of("interleaved", num_chunks=3), loss_fn=mse) as pipe:
        pipe.evaluate(*BATCHES[0])
        weighted = sum(loss.weighted for losses in pipe.auxiliary_losses().values() for loss in losses.values())
        assert weighted == pytest.approx(sum(wanted.weighted.values()), rel=1e-12)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert not any(values.any() for name, values in pipe.state_dict().items() if name.endswith("seen"))
        pipe.step(*BATCHES[0])
        found = pipe.observations()
        pipe.forward(BATCHES[0][0])
        assert pipe.observations() is found  # of the last step or evaluation
        pipe.step(*BATCHES[0])
        for name, parameter in pipe.named_parameters():
            if name in wanted.gradients:
                torch.testing.assert_close(parameter.grad, 2 * wanted.gradients[name], rtol=1e-12, atol=1e-15)
        state = pipe.state_dict()
        assert all(torch.equal(state[f"{name}.seen"], 2 * counts.double()) for name, counts in wanted.largest.items())


def test_repeated_warm_ups_count_once() -> None:
    """Post-validation that undoes updates, beside a barrier: the same weights, values and counts."""

    def train(kind: type[pl.PostValidatedStep | pl.BarrierStep]) -> tuple[dict[str, Tensor], list[Any], Any]:
        with pl.Pipeline(make_model(layer=Counting), schedule_of("1f1b"), loss_fn=mse, transport="threads") as pipe:
            stepper = kind(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), max_norm=1.0)
            values = []
            for step in range(5):
                stepper.step(*make_batch(10, seed=step))
                values.append(pipe.auxiliary_losses())
            stepper.settle()
            return pipe.state_dict(), values, stepper

    state, values, _ = train(pl.BarrierStep)
    speculative, found, stepper = train(pl.PostValidatedStep)
    assert sum(stepper.num_rollbacks.values()) > 0
    assert found == values
    assert all(torch.equal(speculative[name], value) for name, value in state.items())


def test_wrapped_layers_keep_their_names_and_are_called_once() -> None:
    model = nn.Sequential(*map(checkpoint_wrapper, make_model(layer=Counting)))
    with pl.Pipeline(model, schedule_of("zb-v"), loss_fn=mse) as pipe:
        loss = pipe.step(*BATCHES[0])
        assert pipe.observations().keys() == expected(1).largest.keys()
        torch.testing.assert_close(loss, expected(1).loss, rtol=1e-12, atol=0)
        seen = {name.split(".")[0]: value for name, value in pipe.state_dict().items() if name.endswith("seen")}
        assert all(torch.equal(seen[name], counts.double()) for name, counts in expected(1).largest.items())


class InPlace(nn.Module):
    """Changes its input in place, so its first forward fails and runs again on a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        pl.auxiliary_loss(self.scale.square().mean(), 0.5, "early")
        x += 1
        y = x * self.scale
        pl.auxiliary_loss(y.square().mean(), 0.1, "late")
        return y


def test_a_forward_that_runs_twice_declares_once() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8, dtype=F64), InPlace(), nn.Linear(8, 8, dtype=F64))

    torch.manual_seed(0)
    reference = model()
    piped = model()
    piped.load_state_dict(reference.state_dict())
    inputs, targets = make_batch(4)
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        with pl.auxiliary_losses() as found:
            loss = mse(reference(x), y)
        ((loss + found.total()) / 2).backward()
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=2)
    with pl.Pipeline(piped, schedule, loss_fn=mse) as pipe:
        pipe.step(inputs, targets)
        assert set(pipe.auxiliary_losses()["1"]) == {"early", "late"}
        assert pipe.auxiliary_losses()["1"]["early"].value == pytest.approx(1.0, rel=1e-15)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, dict(reference.named_parameters())[name].grad)


def test_a_loss_function_may_declare_too() -> None:
    """Its path leads through the last stage alone."""

    def with_penalty(output: Tensor, targets: Tensor) -> Tensor:
        pl.auxiliary_loss(output.square().mean(), 0.25, "penalty")
        return mse(output, targets)

    reference = make_model(("plain", "plain"))
    for x, y in zip(*(part.split([3, 3, 2, 2]) for part in BATCHES[0]), strict=True):
        output = reference(x)
        ((mse(output, y) + 0.25 * output.square().mean()) * (len(x) / 10)).backward()
    with pl.Pipeline(make_model(("plain", "plain")), schedule_of("zb-h1"), loss_fn=with_penalty) as pipe:
        loss = pipe.step(*BATCHES[0])
        assert loss < mse(reference(BATCHES[0][0]), BATCHES[0][1]) * 1.01
        for name, parameter in pipe.named_parameters():
            wanted = dict(reference.named_parameters())[name].grad
            if wanted is not None:
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15)


def test_plain_loops_count_once_under_checkpointing() -> None:
    layer = Checkpointed(make_model(("mean",))[0])
    with pl.auxiliary_losses() as found:
        output = layer(BATCHES[0][0])
        (output.mean() + found.total()).backward()
    assert layer.calls == 2
    assert [loss.name for loss in found.losses] == ["load"]
    assert [quantity.name for quantity in found.observed] == ["largest"]
    layer(BATCHES[0][0])  # outside: nothing is collected
    assert len(found.losses) == 1
    with pl.auxiliary_losses() as empty:
        assert empty.total() == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pl.auxiliary_loss(torch.ones(2)), r"auxiliary_loss 'auxiliary' is a torch.float32 of shape \(2,\)"),
        (lambda: pl.auxiliary_loss(torch.ones((), dtype=torch.int64)), "must be a floating-point scalar tensor"),
        (lambda: pl.auxiliary_loss(1.0), "auxiliary_loss 'auxiliary' is 1.0: must be a floating-point scalar"),
        (lambda: pl.auxiliary_loss(torch.ones(()), math.inf, "z"), "'z' has weight=inf: must be a finite number"),
        (lambda: pl.auxiliary_loss(torch.ones(()), torch.ones(())), "must be a finite number"),
        (lambda: pl.auxiliary_loss(torch.ones(()), name=""), "auxiliary_loss: name='': must be a string"),
        (lambda: pl.observe("load", [1, 2]), r"observe 'load': the values are \[1, 2\]: must be a tensor of real"),
        (lambda: pl.observe(3, torch.ones(2)), "observe: name=3: must be a string that is not empty"),
    ],
)
def test_bad_input(call: Callable[[], None], text: str) -> None:
    with pytest.raises(InputError, match=text) as found:
        call()
    assert "\n" not in str(found.value)


def test_shapes_of_one_name_must_agree() -> None:
    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            pl.observe("size", torch.ones(len(x)))
            return super().forward(x)

    model = nn.Sequential(*[Growing(8, 8, dtype=F64) for _ in range(2)])
    with pl.Pipeline(model, schedule_of("1f1b"), loss_fn=mse) as pipe:
        pipe.step(*make_batch(5))
        with pytest.raises(pl.PipeloomError, match=r"layer '0' observes 'size' with shapes \[1\] and \[2\]"):
            pipe.observations()


def test_quantities_may_change_from_step_to_step() -> None:
    """One rank observes something new; all notice."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for name in names.get(self.out_features, ()):
                pl.observe(name, torch.ones(1))
            return super().forward(x)

    names: dict[int, tuple[str, ...]] = {}

    def work() -> None:
        model = nn.Sequential(Layer(8, 7, dtype=F64), Layer(7, 8, dtype=F64))
        with pl.Mesh(pp=2) as mesh, pl.Pipeline(model, schedule_of("1f1b"), loss_fn=mse, mesh=mesh) as pipe:
            for step in ({}, {7: ("a",)}, {7: ("a",), 8: ("b", "c")}, {8: ("b",)}, {}):
                mesh.members.gather(b"")
                names.clear()
                names.update(step)
                mesh.members.gather(b"")
                pipe.step(*make_batch(5))
                found = {
                    (layer, name) for layer, own in pipe.observations().items() for name, n in own.items() if n > 0
                }
                assert found == {(str(size - 7), name) for size, own in step.items() for name in own}

    pl.run_threads(2, work, timeout_seconds=60)


def test_errors_name_the_stage() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            pl.auxiliary_loss(x)
            return super().forward(x)

    model = nn.Sequential(*[Wrong(8, 8, dtype=F64) for _ in range(2)])
    with (
        pl.Pipeline(model, schedule_of("1f1b"), loss_fn=mse) as pipe,
        pytest.raises(StageError, match=r"rank 0, stage 0.*auxiliary_loss 'auxiliary' is a torch.float64"),
    ):
        pipe.step(*make_batch(5))


# Wrong weights: each must be noticed by the comparisons above.


def _twice_if_recomputed(state: RankState, action: Any, roots: list[Any], gradients: list[Any]) -> None:
    first = len(roots)
    auxiliary.add_declared(state, action, roots, gradients)
    if state.wiring.recompute[action.stage].value == "full":
        roots += roots[first:]
        gradients += gradients[first:]


SABOTAGE: dict[str, tuple[tuple[object, str, Any], dict[str, Any]]] = {
    "counted twice under recomputation": (
        (computations, "add_declared", _twice_if_recomputed),
        {"name": "1f1b", "recompute": "full"},
    ),
    "the same with a split backward": (
        (computations, "add_declared", _twice_if_recomputed),
        {"name": "zb-h1", "recompute": "full"},
    ),
    "without 1/M": ((RankState, "samples_in", lambda self, b, m: 10), {"name": "1f1b"}),
    "equal weights of uneven micro-batches": ((RankState, "samples_in", lambda self, b, m: 10 / m), {"name": "gpipe"}),
    "a mean over one replica": (
        (RankState, "all_samples", lambda self, _: num_samples_of(self.call)),
        {"name": "1f1b", "replicas": 2},
    ),
    "without the share of a slice": (
        (auxiliary, "Extent", lambda *_: Extent(0, 1, 1)),
        {"name": "seq1f1b", "sizes": {"num_slices": 3}},
    ),
    "not trained": ((computations, "add_declared", lambda *_: None), {"name": "zb-v"}),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_wrong_weights_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, case = SABOTAGE[what]
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError):
        step_and_compare(**case)
