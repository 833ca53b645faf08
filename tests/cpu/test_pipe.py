"""`pl.Pipe`: outputs, gradients, modes, failures and copies, beside the plain model on the same micro-batches."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, RunError
from pipeloom.pipe.batch_norm import DeferredBatchNorm
from tests.cpu.pairwise import in_turn
from tests.cpu.pipe_models import CPU2, grads, layers, on_chunks


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        (one is None) == (other is None) and (one is None or torch.equal(one, other))
        for one, other in zip(found, expected, strict=True)
    )


SIZES = [([6], 4, 8), ([2, 1, 3], 4, 7), ([3, 3], 8, 3), ([1] * 6, 1, 5)]  # partitions, chunks, samples


@pytest.mark.parametrize(("checkpoint", "sizes"), in_turn(["never", "always", "except_last"], SIZES), ids=str)
def test_gradients_are_bitwise_those_of_the_model_on_the_micro_batches(checkpoint, sizes):
    balance, chunks, batch = sizes
    plain, model = layers(), layers()
    model.load_state_dict(plain.state_dict())
    pipe = pl.Pipe(model, balance, chunks=chunks, devices=["cpu"] * len(balance), checkpoint=checkpoint)
    for _ in range(2):  # the second step adds to the gradients of the first
        x = torch.randn(batch, 8, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        output, expected = pipe(x), on_chunks(plain, y, chunks)
        assert torch.equal(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert same(grads(model), grads(plain))


def test_gradients_are_those_of_the_whole_batch():
    plain, model = layers(), layers()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(12, 8, dtype=torch.float64)
    F.mse_loss(pl.Pipe(model, [2, 4], chunks=5, devices=CPU2)(x), x).backward()
    F.mse_loss(plain(x), x).backward()
    for found, expected in zip(grads(model), grads(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_attributes_and_names_are_those_of_the_model():
    model = nn.Sequential()
    for name in ("first", "chunks", "last"):
        model.add_module(name, nn.Linear(2, 2))
    names = list(model.state_dict())
    pipe = pl.Pipe(model, [1, 2], chunks=3, devices=[*CPU2, "cpu"], checkpoint="always")
    assert list(pipe.state_dict()) == [name for name, _ in pipe.named_parameters()] == names
    assert (pipe.balance, pipe.chunks, pipe.checkpoint, pipe.devices) == (
        [1, 2],
        3,
        "always",
        [torch.device("cpu")] * 2,
    )
    assert list(pipe) == list(model)
    assert pipe[-1] is model[2]
    assert len(pipe) == 3
    assert [list(part._modules) for part in pipe.partitions] == [["first"], ["chunks", "last"]]
    pipe.load_state_dict(model.state_dict())


def test_modes_reach_the_layers():
    seen = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    pipe = pl.Pipe(model, [1, 1], chunks=2, devices=CPU2)
    model[1].register_forward_hook(lambda module, _, output: seen.append((module.training, output.grad_fn)))
    assert pipe.eval() is pipe
    with torch.no_grad():
        assert not pipe(torch.ones(2, 2)).requires_grad
    assert seen == [(False, None)] * 2
    with torch.inference_mode():
        assert pipe(torch.ones(2, 2)).is_inference()
    assert [part.training for part in pipe.train().partitions] == [True, True]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = pipe(torch.ones(2, 2))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


class Pair(nn.Module):
    """Takes and gives two tensors, one of them integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = pair
        return self.linear(value) * index[:, None], index + 1


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tuples_with_tensors_that_have_no_gradient(checkpoint):
    model = nn.Sequential(Pair(), Pair())
    plain = copy.deepcopy(model)
    x, index = torch.randn(4, 3, requires_grad=True), torch.arange(4)
    value, counted = pl.Pipe(model, [1, 1], chunks=2, devices=CPU2, checkpoint=checkpoint)((x, index))
    assert not counted.requires_grad
    assert torch.equal(counted, index + 2)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain((x, index))[0].sum(), x)[0])


def test_autograd_grad_retain_graph_and_unused_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(True)
    model[0].unused = nn.Parameter(torch.zeros(3))
    pipe = pl.Pipe(model, [1, 1], chunks=2, devices=CPU2)
    output = pipe(torch.ones(4, 2))
    wanted = [model[0].weight, model[1].bias]
    first = torch.autograd.grad(output.sum(), wanted, retain_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    again = torch.autograd.grad(output.sum(), wanted, retain_graph=True)
    assert all(map(torch.equal, first, again))
    output[:1].sum().backward()
    assert model[0].unused.grad is None
    with pytest.raises(RunError, match="retain_graph=True"):
        output.sum().backward()
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(pipe(torch.ones(4, 2)).sum(), wanted, create_graph=True)


def test_frozen_layers():
    model = layers(4)
    model[0].requires_grad_(False)
    pipe = pl.Pipe(model, [2, 2], chunks=2, devices=CPU2, checkpoint="always")
    pipe(torch.randn(4, 8, dtype=torch.float64)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    assert not pipe.requires_grad_(False)(torch.randn(4, 8, dtype=torch.float64)).requires_grad


def test_hooks_of_parameters_run_once_per_batch_and_those_of_layers_per_micro_batch():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = copy.deepcopy(model)
    calls = []
    for each in (model, plain):
        each[0].weight.register_hook(lambda gradient: calls.append("hook") or gradient.clamp(-1, 1) * 3)
        each[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("post"))
    layer = []
    model[1].register_full_backward_hook(lambda *_: layer.append(1))
    pipe = pl.Pipe(model, [1, 1], chunks=4, devices=CPU2)
    for _ in range(2):
        pipe(torch.ones(8, 2)).sum().backward()
    assert calls == ["hook", "post"] * 2
    for _ in range(2):
        plain(torch.ones(8, 2)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    assert len(layer) == 8


def test_in_place_layers_change_no_input_that_a_recomputation_needs():
    class Adds(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            one, other = pair
            other.add_(1)
            return one * other

    for checkpoint in ("always", "never"):
        pipe = pl.Pipe(nn.Sequential(Adds()), [1], chunks=2, devices=["cpu"], checkpoint=checkpoint)
        for _ in range(2):
            x = torch.ones(4, requires_grad=True)
            pipe((x, torch.ones(4))).sum().backward()
            assert torch.equal(x.grad, torch.full((4,), 2.0))
    for x in (-torch.ones(4), -torch.ones(4, requires_grad=True)):
        output = pl.Pipe(nn.Sequential(nn.ReLU(inplace=True)), chunks=2, checkpoint="never")(x)
        assert torch.equal(output, torch.zeros(4))
        assert torch.equal(x, -torch.ones(4))
    for checkpoint in ("always", "except_last", "never"):  # the second partition gets the batch itself, as a view
        model = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 2))
        pipe, x = pl.Pipe(model, [1, 2], chunks=2, devices=CPU2, checkpoint=checkpoint), torch.randn(6, 2, 2)
        before = x.clone()
        pipe(x).sum().backward()
        with torch.no_grad():
            pipe(x)
        assert torch.equal(x, before)


def test_threads_compute_at_the_same_time_in_forward_and_backward():
    """Each stage waits in its second micro-batch until another one runs too."""
    meetings = {"forward": threading.Barrier(2), "backward": threading.Barrier(2)}

    class Meets(nn.Module):
        def __init__(self, forward: int, backward: int) -> None:
            super().__init__()
            self.turns, self.seen = {"forward": forward, "backward": backward}, {"forward": 0, "backward": 0}

        def meet(self, kind: str) -> None:
            self.seen[kind] += 1
            if self.seen[kind] == self.turns[kind]:
                meetings[kind].wait(30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.meet("forward")
            x = x * 1
            x.register_hook(lambda _: self.meet("backward"))
            return x

    pipe = pl.Pipe(nn.Sequential(Meets(2, 1), Meets(1, 2)), [1, 1], chunks=2, devices=CPU2, checkpoint="never")
    # Stages take turns in the first batch, where it is not known yet whether they draw random numbers.
    pipe._prepare(torch.ones(2))
    pipe._randomness.draws[True] = False
    pipe(torch.ones(2, requires_grad=True)).sum().backward()


def test_copies_pickles_and_threads_end():
    pipe = pl.Pipe(layers(), [3, 3], chunks=2, devices=CPU2)
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = pipe(x)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(other(x), expected)
        assert other[0].weight is not pipe[0].weight
        assert other.partitions[0][0] is other[0]
        assert other.balance == [3, 3]
    ended = weakref.ref(pipe._workers)
    graph = weakref.ref(expected.grad_fn)
    del pipe, other, expected
    gc.collect()
    assert ended() is None
    assert graph() is None


def test_a_layer_that_is_replaced_runs():
    pipe = pl.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2, devices=CPU2)
    pipe(torch.ones(2, 2))
    setattr(pipe, "1", nn.Linear(2, 5))
    assert pipe(torch.ones(2, 2)).shape == (2, 5)
    assert pipe.partitions[1][0] is pipe[1]


def test_a_layer_that_is_replaced_in_the_module_runs():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    for defers in (False, True):
        pipe = pl.Pipe(model, [1, 2], chunks=2, devices=CPU2, deferred_batch_norm=defers)
        x = torch.randn(4, 2)
        pipe(x)
        setattr(pipe, "0", nn.Linear(2, 2))
        model[1], model[2] = nn.BatchNorm1d(2), nn.Linear(2, 5)
        for each in (pipe, copy.deepcopy(pipe)):
            assert each(x).shape == (4, 5)
            assert isinstance(each[1], DeferredBatchNorm) == defers
            assert each.partitions[1][1] is each[2]
        assert pipe[2] is model[2]
        assert pipe[0] is not model[0]
        model[2] = nn.Linear(2, 2)
    model.append(nn.Tanh())
    with pytest.raises(InputError, match=r"the nn\.Sequential of this Pipe has 4 layers, and had 3: .* another Pipe\."):
        pipe(x)


def test_auxiliary_losses_are_means_over_the_batch():
    class Declares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            pl.auxiliary_loss(x.square().mean(), 0.5, "size")
            pl.observe("seen", torch.tensor(len(x)))
            return x

    model = nn.Sequential(Declares(), Declares()).double()
    plain = copy.deepcopy(model)
    x = torch.randn(5, 2, dtype=torch.float64)
    for each in (pl.Pipe(model, [1, 1], chunks=2, devices=CPU2, checkpoint="except_last"), plain):
        with pl.auxiliary_losses() as found:
            output = each(x)
        (output.sum() + found.total()).backward()
        assert [loss.name for loss in found.losses] == ["size", "size"]
        assert sum(int(quantity.values) for quantity in found.observed) == 10
    for one, other in zip(grads(model), grads(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
