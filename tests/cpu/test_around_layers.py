"""Changes around a model's layers after it was cut, and parameters over one memory, are told before a step."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from tests.cpu.test_planned_values import LAYERS, Net

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Chain(Net):
    def forward(self, x):
        return self.last(self.through(self.first(x)))


def pipeline(model, **options):
    built = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    options = options if isinstance(model, nn.Sequential) else {"layers": LAYERS, **options}
    return pl.Pipeline(model, built, loss_fn=F.mse_loss, **options)


@pytest.mark.parametrize("run", ["step", "evaluate", "forward"])
def test_a_forward_that_is_replaced_after_the_cut_is_told(run):
    model = Chain()
    with pipeline(model) as pipe:
        pipe.step(X, X)
        model.forward = types.MethodType(lambda self, x: 2 * Chain.forward(self, x), model)
        for _ in range(2):
            with pytest.raises(pl.PipeloomError, match=r"^Chain has another forward than when the model was cut"):
                getattr(pipe, run)(*((X,) if run == "forward" else (X, X)))
        del model.forward
        pipe.step(X, X)  # nothing was sent
    with pipeline(Chain()) as pipe:
        model.blocks[0].forward = lambda x: x  # of another model
        pipe.step(X, X)


def test_hooks_around_a_chain_are_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    with pipeline(model) as pipe:
        pipe.step(X, X)
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)  # of a layer
        pipe.step(X, X)
        handle = model.register_forward_hook(lambda module, inputs, output: 2 * output)
        with pytest.raises(pl.PipeloomError, match=r"^Sequential has other forward hooks than"):
            pipe.step(X, X)
        handle.remove()
        pipe.step(X, X)


def halves(module, gradients, *others):
    return tuple(None if each is None else each / 2 for each in gradients)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", ["", "1"])
def test_backward_hooks_around_layers_are_told(register, place):
    text = (
        rf"^{f'module {place!r} of ' if place else ''}Sequential has backward hooks, and no stage runs the whole module"
    )
    for before in (True, False):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        if before:
            handle = getattr(model.get_submodule(place), register)(halves)
        with pipeline(model, layers=["0.*", "1.*"]) as pipe:
            if not before:
                pipe.step(X, X)
                handle = getattr(model.get_submodule(place), register)(halves)
            with pytest.raises(pl.PipeloomError, match=text):
                pipe.step(X, X)
            handle.remove()
            getattr(model[1][1], register)(halves)  # of a layer
            pipe.step(X, X)


def test_backward_hooks_run_where_one_stage_runs_the_forward_of_the_model():
    model = Chain()
    model.register_full_backward_pre_hook(halves)
    F.mse_loss(model(X), X).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=LAYERS) as pipe:
        pipe.step(X, X)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_other_layers_are_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    with pipeline(model) as pipe:
        pipe.step(X, X)
        model.append(nn.Tanh())
        with pytest.raises(pl.PipeloomError, match=r"^Sequential has other modules than when .* make another Pipeline"):
            pipe.step(X, X)
        del model[2]
        pipe.step(X, X)


class Tied(Net):
    """The first and the last rank share a weight, so the last rank of a process has a copy of the last layer."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.through(self.first(x)))


def doubles(module, args, settings):
    return tuple(2 * each for each in args), {name: 2 * each for name, each in settings.items()}


@pytest.mark.parametrize("name", ["", "blocks.2", "last"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_apply_to_copies_for_tied_weights(name, before):
    model, whole = Tied().double(), Tied().double()
    x = X.double()

    def register():
        for each in (model, whole):
            part = each.get_submodule(name)
            part.register_forward_hook(lambda module, args, result: 3 * result)
            part.register_forward_pre_hook(doubles, with_kwargs=True)

    if before:
        register()
    with pipeline(model) as pipe:
        pipe.step(x, x)
        for parameter in pipe.parameters():
            parameter.grad = None
        if not before:
            register()
        loss = pipe.step(x, x)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    expected = F.mse_loss(whole(x), x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-10, atol=1e-14)


def test_changes_of_copied_layers_are_told():
    model = Tied()
    with pipeline(model) as pipe:
        expected = pipe.step(X, X)
        model.last.forward = lambda x: x
        with pytest.raises(pl.PipeloomError, match=r"^module 'last' of Tied has another forward than"):
            pipe.step(X, X)
        del model.last.forward
        model.last.extra = nn.Identity()
        with pytest.raises(pl.PipeloomError, match=r"^module 'last' of Tied has other modules than"):
            pipe.step(X, X)
        del model.last.extra
        assert torch.equal(pipe.step(X, X), expected)
        model.blocks[2].forward = lambda x: x + 1  # runs as it is: only the last layer is a copy
        assert not torch.equal(pipe.step(X, X), expected)


@pytest.mark.parametrize(
    ("home", "name"), [("config", "config.encoder_layerdrop"), ("blocks", "blocks.layerdrop")], ids=["config", "module"]
)
def test_layerdrop_is_refused_in_training(home, name):
    model = Chain()
    model.config = types.SimpleNamespace(encoder_layerdrop=0.0)
    setattr(getattr(model, home), name.rpartition(".")[2], 0.0)
    with pipeline(model) as pipe:
        pipe.step(X, X)
        setattr(getattr(model, home), name.rpartition(".")[2], 0.1)
        with pytest.raises(pl.PipeloomError, match=rf"^{name}=0.1: Chain drops whole layers .* Set it to 0"):
            pipe.step(X, X)
        pipe.evaluate(X, X)
        pipe.eval().step(X, X)


def test_parameters_over_one_memory():
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))

    flat = torch.randn(32)
    apart, together, shared = model(), model(), model()
    for index, part in enumerate(flat.split(16)):
        apart[3 * index].weight = nn.Parameter(part.view(4, 4))
    together[3].weight = nn.Parameter(together[2].weight.data)
    for each in (apart, together):
        with pipeline(each) as pipe:
            pipe.step(X, X)
    shared[3].weight = nn.Parameter(shared[0].weight.data.T)
    with pytest.raises(
        pl.PipeloomError, match=r"^'0.weight' and '3.weight' are two parameters .* stages 0 and 1: .*tied"
    ):
        pipeline(shared)


def test_a_check_takes_outputs_with_scalars():
    class Scalars(Net):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            y = self.through(self.first(x))
            return self.last(y), y.square().mean(), self.number

    for number in (3, 0.5):
        model = Scalars(number)
        options = {"loss_fn": lambda output, y: F.mse_loss(output[0], y) + 0.1 * output[1] * output[2]}
        built = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        with pl.Pipeline(model, built, layers=LAYERS, check=(X, X), **options) as pipe:
            output = model(X)
            torch.testing.assert_close(pipe.step(X, X), options["loss_fn"](output, X).detach())
