"""Nothing silently trains another function: forwards that are no chain, hooks, modules that run twice, skips."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.errors import InputError, SplitError, StageError
from pipeloom.models import GPT, GPTConfig
from pipeloom.pipe import Pipe
from pipeloom.split import split


class Residual(nn.Module):
    """x + b(a(x)): no chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class Declared(Residual):
    pipeline_layers = ("a", "b")

    def forward(self, x):
        return self.b(self.a(x))


class Redefined(Declared):
    def forward(self, x):
        return 3 * self.b(self.act(self.a(x)))


class Twice(Residual):
    def forward(self, x):
        h = self.a(x)
        return self.b(h) + self.a(h)


class Skips(nn.Module):
    """Results are combined with those of later layers, changed in place, and read several stages later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        h = self.a(x)
        k = self.b(h)
        k += x
        m = self.c(k.tanh())
        y = self.d(m) * self.b.bias
        return self.e(y + (m + h).tanh()) + h.sin() * k


class Hooked(Skips):
    """Hooks what an early layer returns, which is zeros without a gradient on later stages."""

    def forward(self, x):
        h = self.a(x).tanh()
        h.register_hook(lambda gradient: gradient * 2)
        return self.e(self.d(self.c(self.b(h))))


class Lost(Skips):
    """Its forward does not work on zeros, so the first stage does not find out what the last one reads."""

    def forward(self, x):
        h = self.a(x)
        y = self.c(self.b(h))
        if not y.any():
            raise ValueError("zeros")
        return self.e(self.d(y)) + h


class Several(nn.Module):
    """Packed sequences between layers, and two arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm, self.head = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
        return self.head(self.mix(states).sum(1))


class Options(Residual):
    def forward(self, x, *, scale=None, sign=1.0):
        value = super().forward(x) * sign
        return {"value": value if scale is None else value * scale[:, None]}


def equal_steps(model: nn.Module, inputs=None, loss_fn=F.mse_loss, ranks=2, **options) -> None:
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    inputs = x if inputs is None else inputs
    positional = inputs if isinstance(inputs, tuple) else (inputs,)
    expected = loss_fn(model(**inputs) if isinstance(inputs, dict) else model(*positional), y)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    schedule = pl.schedules.build("zb-h1", num_ranks=ranks, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, **options) as pipe:
        for _ in range(2):  # the first forward finds out what later stages read
            for parameter in pipe.parameters():
                parameter.grad = None
            torch.testing.assert_close(pipe.step(inputs, y), expected.detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_layers_run_inside_the_models_own_forward():
    equal_steps(Residual(), layers=["a", "b"])
    equal_steps(Redefined())
    x = torch.randn(4, 4)
    arguments = {"x": x, "scale": torch.arange(4.0), "sign": -1.0}
    equal_steps(Options(), arguments, lambda output, y: F.mse_loss(output["value"], y), layers=["a", "b"])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_results_that_stages_combine_reach_the_stage_that_combines_them(ranks):
    equal_steps(Skips(), layers=["a", "b", "c", "d", "e"], ranks=ranks)


def test_a_stage_returns_a_parameter():
    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    class Second(nn.Linear):
        def forward(self, value):
            return super().forward(value[0] @ value[1])

    equal_steps(nn.Sequential(First(4, 4), Second(4, 4)))


def test_a_tuple_is_the_arguments_of_a_model_that_needs_several():
    model = Several()
    inputs = torch.randn(4, 5, 3), torch.tensor([5, 3, 2, 1])
    equal_steps(model, inputs, layers=["embed", "lstm", "mix", "head"], ranks=4)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y=0.0):
        return self.b(self.a(x) + y)


class Both(Two):
    def forward(self, x, y):
        return super().forward(x, y)


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        (Two, {"x": X, "foo": 2.0}, r"the batch has 'foo', which the forward of Two\(x, y\) does not take"),
        (Two, {"y": X}, r"the batch has no 'x', which the forward of Two\(x, y\) needs"),
        (
            Two,
            [X],
            r"inputs are a list of 1 value, which may be several .*, or one: .* needs one\. Pass a dict",
        ),
        (Two, (X, X), r"inputs are a tuple of 2 values, which may be several arguments, or one"),
        (Both, {"x": X}, r"the batch has no 'y'"),
        (
            Both,
            X,
            r"inputs are one Tensor, and the forward of Both\(x, y\) needs 2 values\. Pass a dict .*'x': ",
        ),
        (Both, (X, X, X), r"inputs are a tuple of 3 values, and the forward of Both\(x, y\) needs 2"),
    ],
)
def test_batches_that_are_no_arguments_of_the_forward_are_refused(kind, inputs, said):
    model = kind()
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=["a", "b"]) as pipe:
        with pytest.raises(InputError, match=said) as error:
            pipe.step(inputs, X)
        assert "\n" not in str(error.value)
        expected = F.mse_loss(model(X, X), X)
        for right in ({"x": X, "y": X}, *([[X, X]] if kind is Both else ())):  # nothing has run: the pipeline goes on
            torch.testing.assert_close(pipe.step(right, X), expected.detach())


def test_layers_and_an_example_are_refused_together():
    with pytest.raises(SplitError, match="layers and example are both given"):
        split(Two(), 2, layers=["a", "b"], example=X)


def test_a_layer_that_is_named_and_not_called_is_to_be_removed():
    model = Two()
    model.c = nn.Linear(4, 4)
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with (
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=["a", "b", "c"]) as pipe,
        pytest.raises(StageError, match=r"ended without calling 'c', which layers names .* Remove it from layers"),
    ):
        pipe.step(X, X)


def test_hooks_and_replaced_forwards_run():
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), Declared()):
        model.register_forward_hook(lambda module, inputs, output: 2 * output)
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        equal_steps(model)
    model = Residual()
    model.forward = types.MethodType(lambda self, x: self.b(self.a(x)) - x, model)
    equal_steps(model, layers=["a", "b"])


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Twice(), {"layers": ["a", "b"]}, r"runs 'a' twice, in another order than layers"),
        (Residual(), {"layers": ["b", "a"]}, r"runs 'a' .* another order .*example=.*name other layers"),
        (Lost(), {"layers": ["a", "b", "c", "d", "e"], "cut": [2, 3]}, r"reads what earlier stages computed"),
        (
            Hooked(),
            {"layers": ["a", "b", "c", "d", "e"], "cut": [2, 3]},
            r"runs into RuntimeError: cannot register a hook .* before 'c', .* Move such code into the layers",
        ),
    ],
)
def test_what_stages_cannot_run_is_refused(model, options, said):
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, **options) as pipe:
        with pytest.raises((SplitError, StageError), match=said) as error:
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        assert "\n" not in str(error.value)


def test_a_forward_that_calls_another_model_is_refused():
    model = Residual()
    other = model.forward
    model.forward = lambda x: other(x) * 1
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with (
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=["a", "b"]) as pipe,
        pytest.raises(StageError, match=r"set on Residual does not call 'a': .*type\(model\).forward\(module"),
    ):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


def test_slices_refuse_changed_models():
    model = GPT(GPTConfig(vocabulary_size=8, layers=2, width=8, heads=2, sequence_length=4))
    model.register_forward_hook(lambda module, inputs, output: output)
    schedule = pl.schedules.build("terapipe", num_ranks=2, num_microbatches=2, num_slices=2)
    with pytest.raises(SplitError, match="has forward hooks, which stages for parts of sequences do not run"):
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss)


class Misdeclared(Residual):
    """Its pipeline_layers leave out what happens between them."""

    pipeline_layers = ("a", "b")

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def test_check_compares_with_the_model():
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    model = Misdeclared()
    model.act = nn.Tanh()
    with (
        pytest.warns(UserWarning, match="will not run"),
        pytest.raises(InputError, match=r"check: the pipeline computes another result .* layer that differs is 'b'"),
    ):
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, check=x)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, check=(x, y)) as pipe:
        assert all(module.training for module in pipe.modules())
    assert model.training
    with pytest.raises(InputError, match="the model is given in parts"):
        pl.Pipeline(list(model)[:2], schedule, check=x)


@pytest.mark.parametrize(
    ("changed", "act", "words"),
    [
        (1, nn.Identity(), "check: 'b.bias' has other values in the model of rank 1 than in that of rank 0"),
        (None, nn.Tanh(), "the first layer that differs is 'b', on rank 1"),
    ],
)
def test_a_check_tells_all_ranks_of_the_first_layer_that_differs(changed, act, words):
    x, schedule = torch.randn(4, 4), pl.schedules.build("1f1b", num_ranks=3, num_microbatches=2)

    class Longer(Misdeclared):
        pipeline_layers = ("a", "b", "c")

        def __init__(self):
            super().__init__()
            self.act, self.c = act, nn.Linear(4, 4)

        def forward(self, x):
            return self.c(super().forward(x))

    models = [Longer()] * 3
    if changed is not None:
        models[changed] = copy.deepcopy(models[0])
        models[changed].b.bias.data[0] += 1e-5

    def run():
        with pl.Mesh(pp=3) as mesh:
            model = copy.deepcopy(models[mesh.rank])
            try:
                pl.Pipeline(model, schedule, loss_fn=F.mse_loss, mesh=mesh, check=x).close()
            except InputError as error:
                return str(error)

    with pytest.warns(UserWarning, match="will not run"):
        assert all(words in str(said) for said in pl.run_threads(3, run))


class Packs(nn.Module):
    def forward(self, given):
        return pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)


class Recurrent(nn.LSTM):
    def forward(self, packed):
        return super().forward(packed)[0]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.packs, self.first, self.second = Packs(), Recurrent(4, 4), Recurrent(4, 4)

    def forward(self, x, lengths):
        return self.second(self.first(self.packs((x, lengths))))


def test_packed_sequences_are_told_where_stages_do_not_carry_them():
    batch = torch.randn(4, 5, 4), torch.tensor([5, 3, 4, 2])
    model, schedule = Reader(), pl.schedules.build("gpipe", num_ranks=3, num_microbatches=2)
    with (
        pl.Pipeline(nn.Sequential(*model.children()), schedule) as pipe,
        pytest.raises(InputError, match=r"the model returns a PackedSequence, .* Return padded tensors and lengths"),
    ):
        pipe.forward(batch)

    def loss_fn(output, _):
        return output.data.square().sum()

    parts = zip(*(each.chunk(2) for each in batch), strict=True)
    expected = sum(loss_fn(model(*part), None) for part in parts).detach() / 2
    with pl.Pipeline(model, schedule, layers=["packs", "first", "second"], loss_fn=loss_fn) as pipe:
        torch.testing.assert_close(pipe.step({"x": batch[0], "lengths": batch[1]}, batch[0]), expected)
    with pytest.raises(SplitError, match="the example holds a PackedSequence, and a trace takes tensors"):
        pl.Pipeline(Recurrent(4, 4), schedule, example=model.packs(batch))


def test_an_error_of_the_last_layer_of_a_stage_is_told_in_the_first_forward():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("no such row")

    model = Residual()
    model.a = Fails(4, 4)
    schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    pipe = pl.Pipeline(model, schedule, layers=["a", "b"], transport="threads")
    with pipe, pytest.raises(StageError, match="action 0F0, micro-batch 0: ValueError: no such row"):
        pipe.forward(torch.randn(4, 4))


def test_models_on_the_meta_device_are_told_what_to_do():
    x, schedule = torch.randn(4, 4), pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with torch.device("meta"):
        model = Residual()
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    for given, layers in ((model, ["a", "b"]), (chain, None)):
        with pl.Pipeline(given, schedule, loss_fn=F.mse_loss, layers=layers) as pipe:
            for run in (pipe.step, pipe.evaluate):
                with pytest.raises(InputError, match=r"weight' of stage [01] is on the meta device: "):
                    run(x, x)
            for module in pipe.modules():
                module.to_empty(device="cpu")
            pipe.step(x, x)
    with torch.device("meta"):
        model = Residual()
    with pytest.raises(SplitError, match="Residual is on the meta device and the example is not"):
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=x)
    with pytest.raises(InputError, match="layer 1 is on the meta device"):
        Pipe(nn.Sequential(nn.Linear(4, 4), model.b), balance=[1, 1], devices=["cpu", "cpu"])


def test_a_sample_that_the_model_does_not_take():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.b(self.a(x) + y)

    x, schedule = torch.randn(4, 4), pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    chain, pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"example": (x[:2], x[:2]), "cut": "parameters"}
    for model, options, sample, message in (
        (chain, {}, x[:, :3], "the forward of the model raises RuntimeError: mat1 and mat2 shapes"),
        (chain, {}, x.long(), "the forward of the model raises RuntimeError: .*dtype"),
        (chain, {}, (x, x[:, :3].clone()), "loss_fn raises RuntimeError: The size of tensor a"),
        (Two(), pair, (x, x), "the forward of the model raises TypeError: missing .* the pair .inputs, targets"),
    ):
        with pytest.raises(InputError, match=f"^check=.*: {message}") as caught:
            pl.Pipeline(model, schedule, loss_fn=torch.dist, check=sample, **options)
        assert "\n" not in str(caught.value)
    pl.Pipeline(Two(), schedule, loss_fn=F.mse_loss, check=((x, x), x), **pair).close()


def test_check_tells_a_mean_of_means():
    x, y = torch.randn(4, 4), torch.tensor([0, -100, -100, 3])
    y[1] = 1
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="loss_fn is a mean over the labels of a micro-batch"):
        pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, check=(x, y)).close()


class Summed(nn.Module):
    """The last result plus the sum of all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x = block(x)
            total = total + x
        return x + total


def test_a_registered_layout_that_skips_stages_names_layers_which_train_it():
    pl.register_layout(Summed, ["blocks.*"])
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with (
        pl.Pipeline(Summed(), schedule, loss_fn=F.mse_loss) as pipe,
        pytest.raises(StageError, match=r"reads what earlier stages .*Pass layers=.*register another layout"),
    ):
        pipe.step(X, X)
    equal_steps(Summed(), layers=["blocks.*"])


class Around(Skips):
    """Runs a layer inside of a function that computes its gradient, or draws with a generator of its own."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x):
        x = self.a(x)
        x = self.call(self.b, x)
        return self.e(self.d(self.c(x)))


class Within(torch.autograd.Function):
    """Runs a layer, and computes its gradient."""

    @staticmethod
    def forward(ctx, x, layer):
        with torch.enable_grad():
            ctx.inputs = x.detach().requires_grad_()
            ctx.output = layer(ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.output.backward(gradient)
        return ctx.inputs.grad, None


GENERATOR = torch.Generator().manual_seed(1)
AROUND = {
    "reentrant checkpoint": (
        lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        r"runs 'b' inside of torch\.utils\.checkpoint, .*Call the layer itself, and set recompute of the Pipeline",
    ),
    "checkpoint": (lambda layer, x: checkpoint(layer, x, use_reentrant=False), r"inside of torch\.utils\.checkpoint"),
    "function": (lambda layer, x: Within.apply(x, layer), r"inside of an autograd\.Function, .*Call the layer itself"),
    "vmap": (lambda layer, x: torch.vmap(layer)(x), r"inside of a transform of torch\.func, .*Call the layer itself"),
    "grad": (lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x), r"a transform of torch\.func"),
    "generator": (
        lambda layer, x: layer(x) + torch.randn(x.shape, generator=GENERATOR),
        r"draws between its layers with a generator of its own \(torch\.randn, generator=\)",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_functions_with_gradients_of_their_own_around_layers_are_refused(name):
    call, said = AROUND[name]
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    options = {"layers": ["a", "b", "c", "d", "e"], "loss_fn": F.mse_loss}
    for schedule in ("1f1b", "zb-h1"):
        built = pl.schedules.build(schedule, num_ranks=2, num_microbatches=2)
        with pl.Pipeline(Around(call), built, **options) as pipe, pytest.raises(StageError, match=said) as error:
            pipe.step(x, y)
        assert "\n" not in str(error.value)
    one = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)
    model = Around(call)
    with pl.Pipeline(copy.deepcopy(model), one, **options) as pipe:  # one stage runs all
        GENERATOR.manual_seed(1)
        found = pipe.step(x, y)
        gradients = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    GENERATOR.manual_seed(1)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, msg=key)
