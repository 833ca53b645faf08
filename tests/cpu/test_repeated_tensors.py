"""A tensor that occurs several times in a value arrives as one; a change in place of a view of another is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.common.overlaps import overlapping
from pipeloom.errors import RunError
from pipeloom.pipe import pop, skippable, stash
from pipeloom.transport.values import decode, flatten, tensors_in, unflatten, with_overlapping
from tests.cpu.pairwise import of_grid
from tests.cpu.pipe_models import CPU2

F64 = torch.float64
CHECKPOINT = ["never", "always", "except_last"]


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def doubled_sum(value: tuple[Tensor, ...]) -> Tensor:
    first, *_, last = value
    first.mul_(2)
    return first + last.reshape(first.shape)


def make(pair: Callable[[Tensor], tuple[Tensor, ...]], width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(6, 6), Apply(pair), nn.Identity(), Apply(doubled_sum), nn.Linear(width, 3))
    return found.to(F64)


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 48, dtype=F64).view(8, 6), torch.ones(8, 3, dtype=F64)


def run(model: nn.Module, *modules: nn.Module) -> list[Tensor]:
    x, y = make_batch()
    x.requires_grad_()
    for _ in range(2):  # the second run knows whether layers work in place
        model.zero_grad()
        x.grad = None
        loss = F.mse_loss(model(x), y)
        loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for each in modules or (model,) for parameter in each.parameters())]


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("balance", [[2, 3], [2, 1, 2], [3, 2]])
def test_a_pipe_passes_on_one_tensor(checkpoint: str, balance: list[int]) -> None:
    model = make(lambda x: (x, x.tanh(), x))
    pipe = pl.Pipe(copy.deepcopy(model), balance, chunks=2, devices=["cpu"] * len(balance), checkpoint=checkpoint)
    torch.testing.assert_close(run(pipe), run(model), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_the_batch_and_the_output_of_a_pipe_repeat_a_tensor(checkpoint: str) -> None:
    model = nn.Sequential(Apply(lambda pair: (pair[0].mul_(2), pair[1])), Apply(lambda pair: (pair[0], pair[1] + 0)))
    x = make_batch()[0].requires_grad_()
    pipe = pl.Pipe(model, [1, 1], chunks=2, devices=CPU2, checkpoint=checkpoint)
    one, two = pipe((x, x))
    assert torch.equal(one, 2 * x)
    assert torch.equal(two, 2 * x)
    (one + 2 * two).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6))
    again = pl.Pipe(nn.Sequential(nn.Tanh(), Apply(lambda x: (x, x))), [1, 1], chunks=2, devices=CPU2)(x)
    assert again[0] is again[1]
    x.grad = None
    (again[0] + 3 * again[1]).sum().backward()
    torch.testing.assert_close(x.grad, 4 * (1 - x.tanh() ** 2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("balance", [[2, 3], [2, 1, 2]])
def test_a_pipe_refuses_changes_of_memory_that_is_also_elsewhere(checkpoint: str, balance: list[int]) -> None:
    devices = ["cpu"] * len(balance)
    pipe = pl.Pipe(make(lambda x: (x, x.view(-1))), balance, chunks=2, devices=devices, checkpoint=checkpoint)
    with pytest.raises(RunError, match="changes an input in place that has memory in common with another value"):
        pipe(make_batch()[0])
    model = make(lambda x: (x[:, :3], x[:, 3:]), width=3)  # different elements
    pipe = pl.Pipe(copy.deepcopy(model), balance, chunks=2, devices=devices, checkpoint=checkpoint)
    torch.testing.assert_close(run(pipe), run(model), rtol=1e-12, atol=1e-15)


@skippable(stash=["x"])
class Begin(nn.Module):
    def forward(self, x):
        yield stash("x", x)
        return x


@skippable(pop=["x"])
class End(nn.Module):
    def forward(self, x):
        skip = yield pop("x")
        return x.mul_(2) + skip


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_skip_of_a_pipe_that_is_the_value_too(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Begin(), End(), nn.Linear(6, 3)).to(F64)
    pipe = pl.Pipe(copy.deepcopy(model), [2, 2], chunks=2, devices=CPU2, checkpoint=checkpoint)
    torch.testing.assert_close(run(pipe), run(model), rtol=1e-12, atol=1e-15)
    model.insert(2, nn.ReLU(inplace=True))
    pipe = pl.Pipe(model, [2, 1, 2], chunks=2, devices=["cpu"] * 3, checkpoint=checkpoint)
    with pytest.raises(RunError, match="changes an input in place that has memory in common with another value"):
        pipe(make_batch()[0])


@pytest.mark.parametrize(
    ("name", "transport", "recompute"),
    [("1f1b", "loopback", "none"), ("1f1b", "loopback", "full"), ("zb-h1", "threads", "none")],
)
def test_a_pipeline_passes_on_one_tensor(name: str, transport: str, recompute: str) -> None:
    model = make(lambda x: (x, x.tanh(), x))
    model[3].inplace = True  # for recomputation: the block works in place
    loss, _, *expected = run(model)
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=2)
    with pl.Pipeline(
        copy.deepcopy(model), schedule, loss_fn=F.mse_loss, cut=[2, 3], transport=transport, recompute=recompute
    ) as pipe:
        for _ in range(2):
            for parameter in pipe.parameters():
                parameter.grad = None
            found = pipe.step(*make_batch())
            torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close([p.grad for p in pipe.parameters()], expected, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(pipe.forward(make_batch()[0]), model(make_batch()[0]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_a_pipeline_refuses_changes_of_memory_that_is_also_elsewhere(transport: str) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    cases = ((lambda x: (x, x.view(-1)), 6), (lambda x: (x[:, :3], x[:, 3:]), 3), (lambda x: (x, x.view(-1)), 6))
    for number, (pair, width) in enumerate(cases):
        model = make(pair, width=width)
        if number == 2:
            model[3].inplace = True  # known before
        with pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=F.mse_loss, cut=[2, 3], transport=transport) as pipe:
            if number == 1:  # different elements
                torch.testing.assert_close(pipe.step(*make_batch()), run(model)[0], rtol=1e-12, atol=0)
                continue
            with pytest.raises(RunError, match="changes an input in place that has memory in common with another"):
                pipe.step(*make_batch())


SKIPS: dict[str, tuple[list[nn.Module], list[int], bool]] = {
    "next stage": ([Begin(), nn.ReLU(inplace=True), nn.Linear(6, 6), End()], [2, 1, 1, 2], True),
    "passed on": ([Begin(), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 6), End()], [2, 1, 2, 2], True),
    "same stage": ([Begin(), nn.ReLU(inplace=True), nn.Linear(6, 6), End()], [3, 1, 1, 1], False),
    "another value": ([Begin(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), End()], [2, 1, 2, 2], False),
    "a copy": ([Begin(), Apply(Tensor.clone), nn.ReLU(inplace=True), nn.Linear(6, 6), End()], [2, 1, 2, 2], False),
}


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("name", SKIPS)
def test_a_skip_of_a_pipeline_that_is_the_value_too(name: str, transport: str) -> None:
    layers, cut, is_refused = SKIPS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *copy.deepcopy(layers), nn.Linear(6, 3)).to(F64)
    schedule = pl.schedules.build("1f1b", num_ranks=4, num_microbatches=2)
    with pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=F.mse_loss, cut=cut, transport=transport) as pipe:
        if not is_refused:
            for _ in range(2):
                torch.testing.assert_close(pipe.step(*make_batch()), run(model)[0], rtol=1e-12, atol=0)
            return
        with pytest.raises(RunError, match="changes an input in place that has memory in common with another value"):
            pipe.step(*make_batch())


class Outer(nn.Module):
    """Uses a value again behind the layer that has changed it."""

    def __init__(self, again: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.relu, self.b, self.c = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 3)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        skip = self.again(x)
        return self.c(self.b(self.relu(x)) + skip)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_layer_of_a_model_that_changes_an_earlier_result(num_ranks: int) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=num_ranks, num_microbatches=2)
    layers = ["a", "relu", "b", "c"]
    for again in (lambda x: x, lambda x: x.view(-1, 6)):
        with (
            pl.Pipeline(Outer(again).to(F64), schedule, loss_fn=F.mse_loss, layers=layers) as pipe,
            pytest.raises(RunError, match="'relu' changes the result of 'a' in place, and later stages use this"),
        ):
            pipe.step(*make_batch())
    torch.manual_seed(0)
    model = Outer(lambda _: torch.zeros((), dtype=F64)).to(F64)
    with pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=F.mse_loss, layers=layers) as pipe:
        torch.testing.assert_close(pipe.step(*make_batch()), run(model)[0], rtol=1e-12, atol=0)


class PassedOn(nn.Module):
    """A layer returns the memory of its input, which is changed in place behind it."""

    def __init__(self, middle: nn.Module, change: Callable[[Tensor], Tensor], *, uses: bool) -> None:
        super().__init__()
        self.a, self.middle, self.b, self.c = nn.Linear(6, 6), middle, nn.Linear(6, 6), nn.Linear(6, 3)
        self.act, self.change, self.uses = nn.ReLU(inplace=True), change, uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.change(self.act(self.middle(h)) if self.change is same else self.middle(h))
        return self.c(self.b(y) + (h if self.uses else 0))


def same(x: Tensor) -> Tensor:
    return x


def added(x: Tensor) -> Tensor:
    x += 1
    return x


MIDDLES = [nn.Identity(), nn.Dropout(0.0), nn.Unflatten(1, (6,)), Apply(lambda x: x[:, :])]


CUTS = [(1, 3), (2, 2), (3, 1), (1, 1, 2), (2, 1, 1)]


@pytest.mark.parametrize(("middle", "change", "cut"), of_grid(MIDDLES, [same, added, Tensor.relu_], CUTS))
def test_memory_that_a_layer_passes_on(middle: nn.Module, change: Any, cut: tuple[int, ...]) -> None:
    layers = ["a", "middle", "act", "b", "c"] if change is same else ["a", "middle", "b", "c"]
    counts = [*cut[:-1], len(layers) - sum(cut[:-1])]
    schedule = pl.schedules.build("1f1b", num_ranks=len(cut), num_microbatches=2)
    for uses in (False, True):
        torch.manual_seed(0)
        model = PassedOn(middle, change, uses=uses).to(F64)
        if change is not same:
            del model.act
        expected = run(copy.deepcopy(model))[0]
        with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=layers, cut=counts) as pipe:
            if uses:
                with pytest.raises(RunError, match="changes the result of 'a' in place"):
                    pipe.step(*make_batch())
            else:
                for _ in range(2):
                    torch.testing.assert_close(pipe.step(*make_batch()), expected, rtol=1e-12, atol=0)


def test_a_message_holds_a_repeated_tensor_once() -> None:
    x, y = torch.ones(3), torch.zeros(2, dtype=torch.int64)
    value = {"a": x, "b": [y, (x, 1.5)], "c": y}
    layout, tensors = flatten(value)
    assert [id(each) for each in tensors] == [id(x), id(y)] == [id(each) for each in tensors_in(value)]
    found = unflatten(decode(layout.header), [each.clone() for each in tensors])
    assert found["a"] is found["b"][1][0]
    assert found["c"] is found["b"][0]
    assert found["b"][1][1] == 1.5
    assert len(flatten(value, repeated=True)[1]) == 4
    marked = decode(with_overlapping(layout, [1]).header)
    assert (marked.overlapping, layout.overlapping, marked.specs) == ((1,), (), layout.specs)
    again = unflatten(marked, tensors)
    assert again["b"][0] is again["c"] is y


def test_overlapping_tensors_have_an_element_in_common() -> None:
    x = torch.zeros(4, 6)
    assert overlapping([x, x, x + 1]) == [False] * 3
    assert overlapping([x, x[1:], x.clone(), x.t()]) == [True, True, False, True]
    assert overlapping([x[:, ::2], x[:, 1::2], x[:0]]) == [False] * 3
    assert overlapping([x[:, ::2], x[1:2, 2:3].expand(5, 5)]) == [True, True]
