"""Skips of `pl.Pipe`: stash and pop, with and without a pipe."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import PipeTypeError, RunError
from pipeloom.pipe import Namespace, pop, skippable, stash, verify_skippables
from tests.cpu.pairwise import in_turn


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super(Stash, self).__init__()  # noqa: UP008  # the decorated class is the class itself
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        yield stash("skip", x * 2)
        return self.linear(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = yield pop("skip")
        return x if skip is None else x * skip


@skippable(stash=["skip"])
class StashNone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        yield stash("skip", None)
        return x


def nested() -> nn.Sequential:
    """Two skips, one inside the other."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Stash().isolate(outer), Stash().isolate(inner), nn.Linear(4, 4), Pop().isolate(inner), Pop().isolate(outer)
    ).double()


@pytest.mark.parametrize(
    ("checkpoint", "balance"),
    in_turn(["never", "always", "except_last"], [[5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1]]),
    ids=str,
)
def test_nested_skips_have_the_gradients_of_the_model(checkpoint, balance):
    model = nested()
    plain = copy.deepcopy(model)
    pipe = pl.Pipe(model, balance, chunks=3, devices=["cpu"] * len(balance), checkpoint=checkpoint)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    output = pipe(x)
    expected = torch.cat([plain(part) for part in y.chunk(3)])
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    wanted = [y.grad, *(parameter.grad for parameter in plain.parameters())]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_none_goes_over_a_skip_and_no_grad_works():
    pipe = pl.Pipe(nn.Sequential(StashNone(), nn.Linear(2, 2), Pop()), [1, 1, 1], chunks=2, devices=["cpu"] * 3)
    pipe(torch.ones(4, 2)).sum().backward()
    with torch.no_grad():
        pipe(torch.ones(4, 2))


def test_skips_inside_a_layer_of_layers():
    model = nn.Sequential(nn.Sequential(Stash(), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), Pop()))
    x = torch.randn(4, 4)
    torch.testing.assert_close(pl.Pipe(model, [1, 1], chunks=2, devices=["cpu"] * 2)(x), model(x))


def test_decorated_modules_keep_names_copies_and_text():
    layer = Stash()
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]
    assert repr(layer).startswith("@skippable(Stash(\n  (linear): Linear(")
    namespace = Namespace()
    assert Namespace() != namespace
    assert copy.deepcopy(namespace) == namespace
    other = pickle.loads(pickle.dumps(layer.isolate(namespace)))
    assert other.stashable() == layer.stashable() == [(namespace, "skip")]
    assert Stash().stashable() == [(None, "skip")]


def test_skips_that_do_not_pair():
    for layers, text in (
        ([Stash()], "no module declared 'skip' as poppable but stashed"),
        ([Pop()], "'0' declared 'skip' as poppable but it was not stashed"),
        ([Stash(), Stash(), Pop()], "'1' redeclared 'skip' as stashable"),
        ([Stash(), Pop(), Pop()], "'2' redeclared 'skip' as poppable"),
    ):
        with pytest.raises(PipeTypeError, match=text):
            verify_skippables(nn.Sequential(*layers))
        with pytest.raises(TypeError, match=text):
            pl.Pipe(nn.Sequential(*layers))


def test_forwards_that_do_not_do_what_they_declare():
    @skippable(stash=["a"])
    class Forgets(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    @skippable()
    class Undeclared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            yield stash("a", x)
            return x

    @skippable(pop=["never stashed"])
    class Pops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (yield pop("never stashed"))

    @skippable()
    class Yields(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            yield x
            return x

    for layer, text in ((Forgets(), "did not stash"), (Undeclared(), "did not declare"), (Pops(), "no earlier module")):
        with pytest.raises(RunError, match=text):
            layer(torch.ones(1))
    with pytest.raises(PipeTypeError, match="must be stash"):
        Yields()(torch.ones(1))
