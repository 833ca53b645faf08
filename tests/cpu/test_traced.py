"""Traced models train as in one process: losses, gradients, buffers, modes, inputs; errors of tracing."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, PipeloomError, SplitError
from pipeloom.ir import Op, Schedule
from pipeloom.parallel import run_threads
from pipeloom.split import Stages, split
from pipeloom.transport.values import split_batch
from tests.cpu.traced_models import Block, call, case

MODELS = ("unet", "resnet", "towers", "seq2seq", "mixture")
NUM_STAGES, SAMPLES = 4, 9
FAMILIES = [
    family
    for family in pl.schedules.SYNCHRONOUS
    if family not in ("terapipe", "seq1f1b", "seq1f1b-interleaved", "search", "naive")
]


def _schedule(family: str) -> Schedule | None:
    """A schedule of four stages."""
    for num_ranks, num_chunks in ((4, 1), (2, 2)):
        try:
            schedule = pl.schedules.build(family, num_ranks=num_ranks, num_microbatches=4, num_chunks=num_chunks)
        except PipeloomError:
            continue
        if schedule.num_stages == NUM_STAGES:
            return schedule
    return None


@cache
def _traced(name: str) -> tuple[nn.Module, Stages]:
    """A model, untouched, and its stages."""
    model, inputs, _, _ = case(name, SAMPLES)
    example = split_batch(inputs, 4, "inputs")[0][0]
    return copy.deepcopy(model), split(model, NUM_STAGES, example=example, cut="parameters")


def _expected(name: str) -> tuple[Tensor, nn.Module]:
    model, (_, inputs, targets, loss_fn) = copy.deepcopy(_traced(name)[0]), case(name, SAMPLES)
    total = torch.zeros((), dtype=torch.float64)
    pieces, sizes = split_batch(inputs, 4, "inputs")
    for piece, target in zip(pieces, targets.split(sizes), strict=True):
        loss = loss_fn(call(model, piece), target) * (len(target) / SAMPLES)
        loss.backward()
        total += loss.detach()
    return total, model


def _train(name: str, schedule: Schedule, **options: Any) -> None:
    stages = copy.deepcopy(_traced(name)[1])
    loss, expected = _expected(name)
    _, inputs, targets, loss_fn = case(name, SAMPLES)
    with pl.Pipeline(stages, schedule, loss_fn=loss_fn, **options) as pipe:
        assert abs(pipe.step(inputs, targets) - loss) < 1e-12
        found = dict(pipe.named_parameters())
        assert list(found) == [parameter for parameter, _ in expected.named_parameters()]
        for key, parameter in expected.named_parameters():
            if parameter.grad is not None:
                assert torch.allclose(found[key].grad, parameter.grad, rtol=0, atol=1e-12), (schedule.name, key)
        state, wanted = pipe.state_dict(), expected.state_dict()
        assert state.keys() == wanted.keys()
        if len(set(map(len, schedule.placement.replicas))) == 1 and len(schedule.placement.replicas[0]) == 1:
            for key, value in wanted.items():  # replicas of a stage see different samples
                assert torch.allclose(state[key].double(), value.double(), rtol=0, atol=1e-12), (schedule.name, key)
            pipe.eval()
            expected.eval()
            output, whole = pipe.forward(inputs), call(expected, inputs)
            for a, b in zip(
                torch.utils._pytree.tree_leaves(output), torch.utils._pytree.tree_leaves(whole), strict=True
            ):
                assert torch.allclose(a, b, rtol=0, atol=1e-12) if isinstance(a, Tensor) else a == b


# Every other family: traced stages are modules as others are, and the whole grid has all families with all models.
CASES = [(family, MODELS[turn % len(MODELS)]) for turn, family in enumerate(FAMILIES[::2])]


@pytest.mark.parametrize("name", MODELS)
def test_schedules(name: str) -> None:
    for turn, (family, model) in enumerate(CASES):
        schedule = _schedule(family)
        if model == name and schedule is not None:
            _train(name, schedule, recompute=("none", "full")[turn % 2])


@pytest.mark.whole_grid
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"transport": "threads"}], ids=str)
def test_every_combination(name: str, family: str, options: dict[str, Any]) -> None:
    schedule = _schedule(family)
    if schedule is not None:
        _train(name, schedule, **options)


def test_replicas_trace_alike_and_share(tmp_path) -> None:
    """Each thread traces its own copy, and all cut where the times of the first say."""
    models = [_small().double() for _ in range(4)]
    inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)

    def run() -> tuple[Tensor, tuple[tuple[str, ...], ...]]:
        schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
        mesh = pl.Mesh(pp=2, dp=2)
        mine = slice(0, 4) if mesh.coordinate("dp") == 0 else slice(4, 8)
        example = inputs[:2]
        with pl.Pipeline(models.pop(), schedule, loss_fn=F.mse_loss, example=example, mesh=mesh, data="zero3") as pipe:
            loss = pipe.step(inputs[mine], targets[mine])
            torch.optim.SGD(pipe.parameters(), lr=0.1).step()
            return loss, {key: value.clone() for key, value in pipe.state_dict().items()}

    found = run_threads(4, run)
    model = _small().double()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(abs(each[0] - loss) < 1e-12 for each in found)
    state: dict[str, Tensor] = {}
    for _, part in found:
        state |= part
    for key, value in model.state_dict().items():
        assert torch.allclose(state[key], value, rtol=0, atol=1e-12), key


def test_dropout_draws_in_training_only() -> None:
    model = nn.Sequential(_small(dropout=0.3))  # a chain of one layer, which is traced
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    schedule = pl.schedules.build("gpipe", num_ranks=3, num_microbatches=1)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=x, recompute="full") as pipe:
        torch.manual_seed(1)
        loss = pipe.step(x, x)
        torch.manual_seed(1)
        expected = F.mse_loss(plain(x), x)
        expected.backward()
        assert torch.equal(loss, expected.detach())
        gradients = dict(pipe.named_parameters())
        assert all(torch.allclose(gradients[key].grad, p.grad, atol=1e-6) for key, p in plain.named_parameters())
        for mode in (False, True, False):
            pipe.train(mode)
            plain.train(mode)
            torch.manual_seed(2)
            output = pipe.forward(x)
            torch.manual_seed(2)
            assert torch.equal(output, plain(x)), mode
        assert abs(pipe.evaluate(x, x) - F.mse_loss(plain(x), x)) < 1e-6


def test_batches_in_every_form_and_of_every_length() -> None:
    stages = copy.deepcopy(_traced("seq2seq")[1])
    model, inputs, _, _ = case("seq2seq", 5)
    schedule = pl.schedules.build("1f1b", num_ranks=4, num_microbatches=4)
    longer = {"source": torch.arange(40).reshape(8, 5) % 13, "target": torch.arange(72).reshape(8, 9) % 13}
    with pl.Pipeline(stages, schedule, loss_fn=F.mse_loss) as pipe:
        model.load_state_dict(pipe.state_dict())
        for batch in (inputs, longer):
            expected = model(**batch)
            positional = (batch["source"], batch["target"])
            for form in (batch, dict(reversed(batch.items())), positional, (positional, {})):
                assert torch.allclose(pipe.forward(form), expected, rtol=0, atol=1e-12)


def test_a_forward_whose_only_argument_is_a_dict() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.second(self.first(batch["x"]) + batch["z"])

    x, z = torch.randn(2, 4, 4)
    schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    model, batch = Named(), {"x": x, "z": z}
    for example in (batch, {"batch": batch}):
        with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=example, cut=["second"]) as pipe:
            for form in (batch, {"batch": batch}):
                assert torch.allclose(pipe.forward(form), model(batch))


def test_an_input_goes_only_where_it_is_read() -> None:
    model, inputs, targets, loss_fn = case("towers", 8)
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=4)
    example = split_batch(inputs, 4, "inputs")[0][0]
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, example=example, cut=["right.0", "right.2"]) as pipe:
        assert [tuple(skip) for skip in pipe.program.skips] == [(0, 2, False), (1, 2, False)] or [
            tuple(skip) for skip in pipe.program.skips
        ] == [(0, 2, True)]
        assert not any(a.op is Op.SEND_SKIP and a.stage == 1 for _, a in pipe.program.actions())
        pipe.step(inputs, targets)


def test_a_change_in_place_of_the_input_stays_inside() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(1, 2), Block(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2.0)
            y = 2.0 * self.first(x)  # whose backward does not need the result that changes
            y += 1
            return self.second(torch.relu_(y)) + x

    model = InPlace().double()
    plain, x = copy.deepcopy(model), torch.randn(4, 1, 4, 4, dtype=torch.float64)
    kept, schedule = x.clone(), pl.schedules.build("1f1b", num_ranks=2, num_microbatches=1)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=x) as pipe:
        assert torch.equal(x, kept)
        loss = pipe.step(x, kept)
    assert torch.equal(x, kept)
    assert abs(loss - F.mse_loss(plain(x.clone()), kept)) < 1e-12


class _Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


class _Fixed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, 4)


class _Declares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        pl.auxiliary_loss(x.mean(), 0.1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Branch, r"test_traced.py:\d+, 'if x.sum\(\) > 0:': Could not guard .* layers="),
        (_Fixed, "fixes the batch size"),
        (_Declares, "auxiliary losses .* lost"),
    ],
)
def test_what_cannot_be_traced(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(SplitError, match=message) as caught:
        split(nn.ModuleDict({"a": kind(4, 4)})["a"], 1, example=torch.randn(2, 4))
    assert "\n" not in str(caught.value)


def test_what_a_trace_does_not_hold_for() -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            y = self.first(x) * scale
            return self.second(y) if x.shape[1] > 3 else y

    stages = split(Lengths(), 2, example=((torch.randn(2, 5, 4),), {"scale": 2.0}))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(stages, schedule, loss_fn=F.mse_loss) as pipe:
        pipe.forward((torch.randn(4, 8, 4), 2.0))
    for inputs, message in (
        ((torch.randn(4, 2, 4), 2.0), r"> 3"),
        ((torch.randn(4, 5, 3), 2.0), r"size\(\)\[2\] == 4"),
        ((torch.randn(4, 5, 4).double(), 2.0), "float64"),
        ((torch.randn(4, 5, 4), 3.0), "another kind or value"),
        (torch.randn(4, 5, 4), "inputs lack 'scale': the example that was traced has 'x', 'scale'"),
        ((torch.randn(4, 5, 4), (2.0, 1.0)), "input 'scale' has another nesting"),
    ):
        with pl.Pipeline(copy.deepcopy(stages), schedule, loss_fn=F.mse_loss) as pipe:
            with pytest.raises(InputError, match=message):
                pipe.forward(inputs)
            pipe.forward((torch.randn(4, 8, 4), 2.0))  # refused before anything ran


def test_a_trace_that_holds_for_larger_micro_batches_alone() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y if x.shape[0] > 2 else x - y)

    stages = split(Counts(4, 4), 1, example=(torch.randn(5, 4), torch.randn(5, 4)))
    with pl.Pipeline(stages, pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)) as pipe:
        pipe.forward((torch.ones(6, 4), torch.ones(6, 4)))
        with pytest.raises(
            InputError, match=r"a micro-batch has 2 samples, .* example has 5, .*> 2.* least 3 samples, or"
        ):
            pipe.forward((torch.ones(4, 4), torch.ones(4, 4)))


def test_an_example_that_the_model_does_not_take() -> None:
    """It is no error of the line at which the model fails."""
    with pytest.raises(SplitError, match=r"example=.*: the forward of Small raises .* Pass inputs that the model"):
        split(_small(), 2, example=torch.randn(2, 5))


def _small(dropout: float = 0.0) -> nn.Module:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.drop = nn.Dropout(dropout)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.drop(torch.tanh(self.a(x)))
            return self.c(self.drop(self.b(kept))) + F.dropout(kept, dropout, self.training)

    torch.manual_seed(3)
    return Small()


@pytest.mark.parametrize(
    ("num_stages", "cut", "message"),
    [
        (2, ["nowhere"], "does not call"),
        (3, ["b"], "begin at 2 modules"),
        (3, ["c", "b"], "in the order"),
        (2, [3, 2], "names of modules"),
        (2, "bytes", "by 'time'"),
        (99, "parameters", "places between calls"),
    ],
)
def test_cuts_that_cannot_be(num_stages: int, cut: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split(_small(), num_stages, example=torch.randn(2, 4), cut=cut)


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))) + x)


CHANGES: dict[str, tuple[Any, str]] = {
    "model.eval": (lambda model, pipe: model.eval(), "the model got training=False"),
    "norm.eval": (lambda model, pipe: model.norm.eval(), "module 'norm' of the model got training=False"),
    "rate": (lambda model, pipe: setattr(model.drop, "p", 0.0), "module 'drop' of the model got p=0.0"),
    "both": (lambda model, pipe: (model.eval(), pipe.eval()), ""),
    "pipe.eval": (lambda model, pipe: pipe.eval(), ""),
    "back": (lambda model, pipe: (model.eval(), model.train()), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modes_that_change_after_the_trace_are_told_once(change: str) -> None:
    model, x = _Drops(), torch.randn(8, 4)
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=x[:4], cut="parameters") as pipe:
        pipe.step(x, x)
        CHANGES[change][0](model, pipe)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.step(x, x)
    texts = [str(each.message) for each in told]
    assert [text.partition(" after the pipeline")[0] for text in texts] == [CHANGES[change][1]] * bool(
        CHANGES[change][1]
    )
