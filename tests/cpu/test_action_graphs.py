"""Actions recorded and replayed: what CUDA graphs must not change, with graphs that run on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.devices import HostDevice
from pipeloom.errors import InputError, PipeloomError
from tests.cpu.fake_graphs import FakeGraphs
from tests.cpu.pairwise import in_turn


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    found = FakeGraphs()
    monkeypatch.setattr(HostDevice, "graphs", lambda self: found)
    return found


def _model(layers: int = 4, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double() for _ in range(layers)]
    if tied:
        blocks[-1][0].weight = blocks[0][0].weight  # type: ignore[union-attr]
    return nn.Sequential(*blocks)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _train(
    schedule: Any, *, graphs: bool, tied: bool = False, steps: int = 6, zero: bool = True, loss: Any = _loss
) -> Any:
    model = _model(schedule.num_stages, tied)
    pipe = pl.Pipeline(model, schedule, loss_fn=loss, transport="loopback", graphs=graphs)
    optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for step in range(steps):
        x, y = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
        losses.append(pipe.step(x, y))
        gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
        if zero or step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 0)
    weights = [parameter.detach().clone() for parameter in pipe.parameters()]
    num_computations = sum(action.op.value in "FBIW" for _, action in pipe.program.actions())
    return losses, gradients, weights, pipe.memory.peak_live_activations, num_computations


def _recorded(model: nn.Module) -> tuple[pl.Pipeline, Tensor]:
    """A pipeline whose actions are recorded, and a batch for it."""
    schedule = pl.schedules.build("1f1b", num_ranks=4, num_microbatches=2)
    pipe = pl.Pipeline(model, schedule, loss_fn=_loss, transport="loopback", graphs=True)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(4):
        pipe.step(x, x)
    return pipe, x


@pytest.mark.parametrize(
    ("name", "zero"), in_turn(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"], [True, False])
)
def test_replayed_steps_are_those_without_graphs(graphs: FakeGraphs, name: str, zero: bool) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    expected = _train(schedule, graphs=False, zero=zero)
    found = _train(schedule, graphs=True, zero=zero)
    assert graphs.num_recordings == found[4]
    assert graphs.num_replays == 4 * found[4]
    bound = 0.0 if zero else 1e-12  # gradients of earlier steps are added at the end
    torch.testing.assert_close(list(expected[:3]), list(found[:3]), rtol=bound, atol=bound)
    assert expected[3:] == found[3:]


def test_tied_parameters_are_summed(graphs: FakeGraphs) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    expected, found = (_train(schedule, graphs=on, tied=True) for on in (False, True))
    torch.testing.assert_close(list(expected[:3]), list(found[:3]), rtol=0, atol=0)


def test_ranks_that_exchange_messages(graphs: FakeGraphs) -> None:
    schedule = pl.schedules.build("interleaved", num_ranks=2, num_microbatches=4)
    losses, gradients, *_ = _train(schedule, graphs=False)
    models = [_model(4), _model(4)]  # here: threads share one random generator

    def rank() -> tuple[list[Tensor], list[Tensor], list[str]]:
        pipe = pl.Pipeline(models.pop(), schedule, loss_fn=_loss, mesh=pl.Mesh(pp=2), graphs=True)
        optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        found: list[Tensor] = []
        for step in range(6):
            x, y = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
            found.append(pipe.step(x, y))
            last = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 0)
        return found, last, [name for name, _ in pipe.named_parameters()]

    names = [name for name, _ in _model(4).named_parameters()]
    results = pl.run_threads(2, rank)
    for found, last, held in results:
        torch.testing.assert_close(found, losses, rtol=0, atol=0)
        torch.testing.assert_close(last, [gradients[-1][names.index(name)] for name in held], rtol=0, atol=0)
    assert sorted(name for *_, held in results for name in held) == sorted(names)


def test_other_shapes_are_refused_and_the_next_step_runs(graphs: FakeGraphs) -> None:
    pipe, x = _recorded(_model())
    with pytest.raises(InputError, match=r"\[1, 6\] float64, and earlier ones had \[2, 6\] float64"):
        pipe.step(x[:2], x[:2])
    assert pipe.step(x, x).isfinite()


def test_frozen_layers_are_recorded_again(graphs: FakeGraphs) -> None:
    model = _model()
    pipe, x = _recorded(model)
    first = model[1][0].weight  # type: ignore[index]
    first.requires_grad_(False)
    first.grad = None
    for _ in range(4):
        pipe.step(x, x)
    assert first.grad is None
    assert graphs.num_recordings == 2 * 16


def test_a_stage_that_reads_values_is_named(graphs: FakeGraphs) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _loss(output, target) * (2.0 if output.sum().item() > 1e9 else 1.0)

    with pytest.raises(PipeloomError, match=r"stage 1, action 1F0.*cannot be recorded in a CUDA graph"):
        _train(pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2), graphs=True, loss=loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "threads"}, "transport='threads'"),
        ({"precision": "bf16"}, "precision"),
        ({"slices": [3, 3]}, "slices"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], words: str) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match=words):
        pl.Pipeline(_model(2), schedule, loss_fn=_loss, graphs=True, **options)


def test_blocks_are_compiled_in_place() -> None:
    model = _model(2)
    names = [name for name, _ in model.named_parameters()]
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    pipe = pl.Pipeline(model, schedule, loss_fn=_loss, compile=True)
    assert all(block._compiled_call_impl is not None for block in model)
    assert [name for name, _ in pipe.named_parameters()] == names


def test_the_cpu_has_no_graphs() -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match="ranks of this process compute on cpu"):
        pl.Pipeline(_model(2), schedule, loss_fn=_loss, graphs=True)
