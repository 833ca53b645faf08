"""`pl.Pipe`: random numbers, statistics, errors of stages, balance, and what is refused."""

from __future__ import annotations

import copy
import random
import threading
import traceback

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, PipeTypeError, RunError, TooFewDevices
from pipeloom.pipe import DeferredBatchNorm, balance_by_size, balance_by_time, is_checkpointing, is_recomputing
from tests.cpu.pipe_models import CPU2, grads, layers, on_chunks


class Pair(nn.Module):
    """Takes and gives two tensors, one of them integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = pair
        return self.linear(value) * index[:, None], index + 1


class Noise(nn.Module):
    p = 0.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20 if self.p else 0):
            x = F.dropout(x, p=self.p)
        return x


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_recomputation_draws_the_same_random_numbers_and_seeds_repeat(checkpoint):
    def run() -> torch.Tensor:
        torch.manual_seed(3)
        pipe = pl.Pipe(
            nn.Sequential(Noise(), Noise(), Noise()), [1, 1, 1], chunks=5, devices=["cpu"] * 3, checkpoint=checkpoint
        )
        outputs = []
        for _ in range(2):
            x = torch.ones(10, 50, requires_grad=True)
            y = pipe(x)
            y.sum().backward()
            assert torch.equal(x.grad, y)  # the masks of the forward
            outputs.append(y.detach())
        assert not torch.equal(*outputs)
        assert len({tuple(part.flatten().tolist()) for part in outputs[0].chunk(5)}) == 5
        return torch.stack(outputs)

    assert torch.equal(run(), run())


class Scales(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.full_like(x, random.random() + np.random.rand())


@pytest.mark.parametrize("chunks", [1, 5])
def test_recomputation_draws_the_same_numbers_of_python_and_numpy(chunks):
    pipe = pl.Pipe(
        nn.Sequential(Scales(), Scales(), Scales()), [1, 1, 1], chunks=chunks, devices=["cpu"] * 3, checkpoint="always"
    )
    for _ in range(3):
        x = torch.ones(10, 5, requires_grad=True)
        y = pipe(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y)


def test_one_micro_batch_draws_as_the_model_does_and_models_that_do_not_draw_leave_the_generator():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(6, 4)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(pl.Pipe(model, [2, 2], chunks=1, devices=CPU2)(x), expected)
    pipe = pl.Pipe(layers(4), [2, 2], chunks=3, devices=CPU2)
    before = torch.get_rng_state()
    for _ in range(2):
        pipe(torch.ones(6, 8, dtype=torch.float64)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_random_numbers_that_begin_later_are_repeated_in_turns():
    model = nn.Sequential(Noise(), nn.Identity(), Noise())
    pipe = pl.Pipe(model, [2, 1], chunks=2, devices=CPU2, checkpoint="always")
    x = torch.ones(4, 20, requires_grad=True)
    model[0].p = model[2].p = 0.0
    pipe(x)
    model[0].p = model[2].p = 0.1
    y = pipe(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    model[0].p = model[2].p = 0.0
    setattr(pipe, "1", nn.BatchNorm1d(20))
    pipe(x)
    model[0].p = 0.1
    with pytest.raises(RunError, match="Run the batch again"):
        pipe(x)
    pipe(x)


class Norms(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_has_the_statistics_of_the_whole_batch(checkpoint, momentum):
    model = nn.Sequential(Norms(momentum=momentum), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=momentum)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3)[..., None, None])  # so that the second statistics have a simple reference
    plain = copy.deepcopy(model[0])
    names = list(model.state_dict())
    pipe = pl.Pipe(model, [1, 2], chunks=4, devices=CPU2, checkpoint=checkpoint, deferred_batch_norm=True)
    assert list(pipe.state_dict()) == names
    assert isinstance(pipe[0].norm, DeferredBatchNorm)
    for batch in (8, 3, 6):  # fewer micro-batches than chunks as well
        x = torch.randn(batch, 3, 5, 4, dtype=torch.float64) * 3 + 1
        pipe(x).sum().backward()
        plain(x)
    for name, value in plain.norm.named_buffers():
        torch.testing.assert_close(pipe[0].norm.get_buffer(name), value, rtol=1e-12, atol=1e-12)
    assert int(pipe[2].num_batches_tracked) == 3
    x = torch.randn(4, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(pipe[0].eval()(x), plain.eval()(x))


def test_recomputation_leaves_statistics_and_notices_other_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 2)
    pl.Pipe(model, [1, 1], chunks=4, devices=CPU2, checkpoint="always")(x).sum().backward()
    on_chunks(plain, x, 4)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    changing = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    with pytest.raises(RunError, match=r"changes its buffer .*checkpoint='never'"):
        pl.Pipe(nn.Sequential(changing), chunks=2, checkpoint="always")(x)
    pl.Pipe(nn.Sequential(changing), chunks=2, checkpoint="never")(x).sum().backward()


def test_a_failed_batch_leaves_nothing_in_deferred_statistics():
    model = nn.Sequential(nn.BatchNorm1d(2), Fails(2))
    pipe = pl.Pipe(model, [2], chunks=4, devices=["cpu"], deferred_batch_norm=True)
    with pytest.raises(KeyError):
        pipe(torch.ones(8, 2))
    model[1].at = None
    pipe(torch.zeros(8, 2))
    assert torch.equal(model[0].running_mean, torch.zeros(2))


class Fails(nn.Module):
    """Raises in the forward or in the backward of a call."""

    def __init__(self, at: int | None = None, *, in_backward: bool = False) -> None:
        super().__init__()
        self.at, self.calls, self.in_backward = at, 0, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.at != self.calls:
            return x * 1
        if self.in_backward:
            x = x * 1
            x.register_hook(self.fail)
            return x
        self.fail(x)
        return x

    def fail(self, _: torch.Tensor) -> None:
        raise KeyError("the stage's own error")


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("in_backward", [False, True])
def test_errors_of_stages_are_raised_with_their_traceback_and_the_pipe_goes_on(position, in_backward):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model.insert(position, Fails(2, in_backward=in_backward))
    pipe = pl.Pipe(model, [1, 1, 1, 1], chunks=4, devices=["cpu"] * 4, checkpoint="never")
    with pytest.raises(KeyError, match="own error") as caught:
        pipe(torch.ones(8, 2, requires_grad=True)).sum().backward()
    text = "".join(traceback.format_exception(caught.value))
    assert f"partition {position} (layer {position}) on cpu, micro-batch 1" in text
    assert "in fail" in text
    model[position].at = None
    pipe(torch.ones(8, 2)).sum().backward()
    assert all(gradient is not None for gradient in grads(model))


def test_the_first_error_of_the_schedule_is_raised():
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            started.wait(10)
            raise ValueError("micro-batch 0 of partition 1")

    class Fast(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                started.set()
                raise KeyError("micro-batch 1 of partition 0")
            return x

    for _ in range(3):
        started = threading.Event()
        fast = Fast()
        with pytest.raises(KeyError):
            pl.Pipe(nn.Sequential(fast, Slow()), [1, 1], chunks=4, devices=CPU2)(torch.ones(4, 1))
        assert fast.calls == 2


def test_tensors_that_are_no_parameters_are_noticed():
    outside = torch.ones(2, requires_grad=True)

    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * outside

    for checkpoint in ("never", "always"):
        pipe = pl.Pipe(nn.Sequential(nn.Linear(2, 2), Uses()), [2], devices=["cpu"], checkpoint=checkpoint)
        with pytest.raises(RunError, match="neither a parameter"):
            pipe(torch.ones(2, 2)).sum().backward()


def test_recomputation_is_visible():
    seen = []

    class Sees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x * 2

    pl.Pipe(nn.Sequential(Sees()), chunks=2, checkpoint="except_last")(
        torch.ones(2, requires_grad=True)
    ).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]


def test_balance_is_measured():
    class Works(nn.Module):
        def __init__(self, size: int, width: int = 1) -> None:
            super().__init__()
            self.size = size
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.size):
                x = (x * 1.01).tanh()
            return x * self.weight.sum()

    model = nn.Sequential(*(Works(size) for size in (40, 40, 40, 40, 40, 600)))
    sample = torch.randn(64, 64)
    before = [parameter.clone() for parameter in model.parameters()]
    assert balance_by_time(2, model, sample, timeout=0.1) == [5, 1]
    assert balance_by_size(2, model, sample) == [5, 1]
    assert all(map(torch.equal, before, model.parameters()))
    heavy = nn.Sequential(*(Works(1, 10**5) for _ in range(3)), *(Works(1) for _ in range(3)))
    assert balance_by_size(2, heavy, sample, param_scale=4.0) == [2, 4]
    pipe = pl.Pipe(model, "size", chunks=4, devices=CPU2)
    with pytest.raises(InputError, match="first batch"):
        _ = pipe.partitions
    assert pl.Pipe(model, "time", chunks=4, devices=CPU2, sample=sample).balance == [5, 1]
    pipe(sample)
    assert pipe.balance == pl.Pipe(model, "size", chunks=4, devices=CPU2, sample=sample).balance == [5, 1]
    assert pl.Pipe(heavy, devices=CPU2).balance == [2, 4]
    assert pl.Pipe(heavy, devices=CPU2).devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"balance": [1]}, InputError, "the model has 2 layers, not 1"),
        ({"balance": [0, 2]}, InputError, "at least one layer"),
        ({"balance": "fast"}, InputError, "list of layers per partition"),
        ({"balance": [1, 1], "devices": ["cpu"]}, TooFewDevices, "2 partitions, 1 devices"),
        ({"chunks": 0}, InputError, "chunks=0: must be a positive integer"),
        ({"chunks": 2.0}, InputError, r"chunks=2\.0: must be a positive integer"),
        ({"checkpoint": "sometimes"}, InputError, "'always', 'except_last', or 'never'"),
        ({"devices": []}, InputError, "at least one device"),
        ({"devices": ["hall"]}, InputError, "'hall' is no device"),
        ({"devices": ["cpu", "cuda:99"]}, InputError, "'cuda:99' does not exist"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        pl.Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), **arguments)
    assert "\n" not in str(caught.value)


def test_models_and_values_that_do_not_fit():
    shared = nn.Linear(2, 2)
    own = nn.Sequential(nn.Linear(2, 2))
    own.register_forward_hook(lambda *_: None)

    class Other(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    for model, error, text in (
        (nn.Linear(2, 2), PipeTypeError, "must be nn.Sequential"),
        (Other(shared), InputError, "a forward of its own"),
        (own, InputError, "Register them on the Pipe"),
        (nn.Sequential(shared, shared), InputError, "duplicate children"),
        (nn.Sequential(shared, nn.Sequential(shared)), InputError, "duplicate parameters"),
        (nn.Sequential(nn.LazyLinear(2)), InputError, "lazy"),
        (nn.Sequential(), InputError, "no layers"),
    ):
        with pytest.raises(error, match=text):
            pl.Pipe(model)
    relu = nn.ReLU()
    pipe = pl.Pipe(nn.Sequential(relu, nn.Linear(2, 2), relu), [1, 2], devices=CPU2, chunks=2)
    pipe(torch.ones(2, 2))
    with pytest.raises(PipeTypeError, match="must be a tensor or a tuple of tensors"):
        pipe("text")
    with pytest.raises(PipeTypeError, match="must be a tensor or a tuple"):
        pipe((torch.ones(2, 2), 1))
    with pytest.raises(PipeTypeError, match=r"takes one value: .* Call it as pipe\(\(x, y\)\)\."):
        pipe(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(InputError, match="no dimension 0"):
        pipe(torch.tensor(1.0))
    with pytest.raises(InputError, match="same batch size"):
        pl.Pipe(nn.Sequential(Pair()), chunks=4)((torch.ones(2, 3), torch.ones(5)))
    with pytest.raises(InputError, match=r"batch sizes \[8, 3\]: .* same batch size"):  # 3 micro-batches each
        pl.Pipe(nn.Sequential(Pair()), chunks=3)((torch.ones(8, 3), torch.ones(3)))
    for move in (pipe.cuda, pipe.cpu, lambda: pipe.to("cpu"), lambda: pipe.to(torch.ones(1)), lambda: pipe.to(0)):
        with pytest.raises(TypeError, match="stays on its devices"):
            move()
    assert pipe.double().to(dtype=torch.float32)[1].weight.dtype == torch.float32


def test_a_failure_stops_the_calls_behind_it_where_stages_take_turns():
    after = Fails(1)
    pipe = pl.Pipe(
        nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity(), after), [1] * 4, chunks=8, devices=["cpu"] * 4
    )
    with pytest.raises(KeyError):
        pipe(torch.ones(8))
    assert after.calls == 1  # of 8: the stage before it may have been ahead, so its calls are not counted


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_gradients_of_a_functional_call_are_those_of_its_parameters(checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 2)).double()
    pipe = pl.Pipe(copy.deepcopy(model), [1, 2], chunks=3, devices=CPU2, checkpoint=checkpoint)
    pipe[1].eval()
    held = list(pipe.parameters())
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
    own = [{name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()} for _ in range(2)]
    for each, given in zip((pipe, model), own, strict=True):
        made = {name: parameter * 1.5 for name, parameter in given.items()}  # of a step inside of the graph
        torch.func.functional_call(each, made, x).square().sum().backward()
    for name, parameter in own[0].items():
        torch.testing.assert_close(parameter.grad, own[1][name].grad, rtol=1e-12, atol=1e-12)
    assert all(one is other and one.grad is None for one, other in zip(pipe.parameters(), held, strict=True))


def test_reentrant_checkpoints_are_refused():
    class Inner(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    pipe = pl.Pipe(nn.Sequential(nn.Linear(2, 2), Inner(2, 2)), [1, 1], chunks=2, devices=CPU2, checkpoint="never")
    with pytest.raises(RunError, match=r"layer 1\) on cpu calls .* with use_reentrant=True") as error:
        pipe(torch.ones(4, 2)).sum().backward()
    assert "\n" not in str(error.value)


def test_torch_compile_leaves_a_pipe_as_it_is():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    pipe = pl.Pipe(model, [1, 1], chunks=2, devices=CPU2)
    x = torch.ones(4, 2, dtype=torch.float64)
    found = torch.compile(lambda x: pipe(2 * x) + 1, backend="eager")(x)
    torch.testing.assert_close(found, model(2 * x) + 1)
    found.sum().backward()
    torch.testing.assert_close(model[1].bias.grad, torch.full((1,), 4.0, dtype=torch.float64))


class Later(nn.Module):
    """Draws from Python's or numpy's generator, once it is told to."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw, self.begins = draw, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draw() if self.begins else x.clone()


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_of_python_and_numpy_that_begin_later_are_repeated(draw):
    model = nn.Sequential(Later(draw), nn.Identity(), Later(draw))
    pipe = pl.Pipe(model, [2, 1], chunks=3, devices=CPU2, checkpoint="always")
    x = torch.ones(6, 4, requires_grad=True)
    pipe(x)
    model[0].begins = model[2].begins = True
    y = pipe(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)


class Average(nn.Linear):
    """Sets a buffer to another tensor in each forward, and uses it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.5 * self.average + x.detach().mean(0)
        return super().forward(x) * self.average


def test_buffers_that_a_forward_replaces_are_noticed():
    x, model = torch.randn(6, 2), nn.Sequential(Average(), nn.Linear(2, 2))
    with pytest.raises(RunError, match=r"changes its buffer '0.average' .*checkpoint='never'"):
        pl.Pipe(copy.deepcopy(model), [1, 1], chunks=3, devices=CPU2, checkpoint="always")(x)
    plain = copy.deepcopy(model)
    pl.Pipe(model, [1, 1], chunks=3, devices=CPU2, checkpoint="never")(x).sum().backward()
    on_chunks(plain, x, 3)
    assert torch.equal(model[0].average, plain[0].average)


class Twice(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_deferred_statistics_are_those_of_torchs_norms_alone():
    x = torch.randn(6, 2)
    norm, parametrized, changed = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda module, inputs, output: 3 * output)
    expected = copy.deepcopy(norm)(x)
    pipe = pl.Pipe(nn.Sequential(norm), chunks=1, deferred_batch_norm=True)
    assert isinstance(pipe[0], DeferredBatchNorm)
    torch.testing.assert_close(pipe(x), expected)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    changed.forward = lambda x: x
    for other, text in (
        (Twice(2), "Twice has a forward"),
        (changed, "BatchNorm1d has a f"),
        (parametrized, "parametr"),
    ):
        with pytest.raises(InputError, match=f"^deferred_batch_norm=True: .*{text}"):
            pl.Pipe(nn.Sequential(nn.Sequential(other)), chunks=1, deferred_batch_norm=True)


class Trims(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(x[0, 0])]


def test_micro_batches_that_cannot_be_joined_are_told():
    x = torch.ones(4, 3)
    x[2:, 0] = 2
    with pytest.raises(InputError, match=r"of shapes \[samples, \.\.\.\] with \(1,\) and \(2,\) behind"):
        pl.Pipe(nn.Sequential(nn.Identity(), Trims()), [1, 1], chunks=2, devices=CPU2)(x)


class Lists(nn.Module):
    def forward(self, x: torch.Tensor) -> list[object]:
        return [x, 1]


@pytest.mark.parametrize("measure", [balance_by_size, balance_by_time])
def test_what_cannot_be_measured(measure):
    model, sample = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.ones(2, 2)
    before = torch.get_rng_state()
    assert sum(measure(2, model, sample)) == 2
    assert torch.equal(before, torch.get_rng_state())
    for number in (0, 3, "2"):
        with pytest.raises(
            InputError, match=r"^partitions=.*: must be an integer from 1 to 2, the number of layers\.$"
        ):
            measure(number, model, sample)
    with pytest.raises(InputError, match="'hall' is no device"):
        measure(2, model, sample, device="hall")
    with pytest.raises(PipeTypeError, match=r"^the output of layer 0 is "):
        measure(1, nn.Sequential(Lists(), nn.Identity()), sample)
    with pytest.raises(InputError, match=r"^chunks=0: "):
        balance_by_size(2, model, sample, chunks=0)
