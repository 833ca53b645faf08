"""CUDA graphs and torch.compile: the numbers of a pipeline without them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from tests.cpu.reference import language_loss
from tests.gpu.gpt import larger, larger_batch


def _train(
    name: str, num_ranks: int, dtype: torch.dtype, *, autocast: bool = False, dropout: float = 0.0, **options
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of six steps with updates: the third is recorded, the next are replayed."""
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    inputs, targets = larger_batch(48)
    losses, gradients = [], []
    model = larger(4, 64, dropout).to(dtype)
    torch.cuda.manual_seed(5)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, transport="loopback", **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(6):
            part = slice(8 * step, 8 * step + 8)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                losses.append(pipe.step(inputs[part], targets[part]).clone())
            found = sorted(pipe.named_parameters())
            gradients += [parameter.grad.clone() for _, parameter in found if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(pipe.evaluate(inputs[:8], targets[:8]))
    return losses, gradients


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "num_ranks"), [("gpipe", 1), ("1f1b", 2), ("zb-h1", 2), ("interleaved", 2)])
def test_graphs_change_no_bit(name: str, num_ranks: int, dtype: torch.dtype) -> None:
    losses, gradients = _train(name, num_ranks, dtype, graphs=True)
    expected_losses, expected = _train(name, num_ranks, dtype)
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected_losses]
    assert len(gradients) == len(expected)
    wrong = [number for number, (a, b) in enumerate(zip(gradients, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, wrong


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize(
    "options",
    [{"autocast": True}, {"dropout": 0.2}, {"recompute": "full"}, {"recompute": "selective"}],
    ids=["autocast", "dropout", "full recomputation", "selective recomputation"],
)
def test_graphs_of_other_forwards(options: dict) -> None:
    losses, gradients = _train("1f1b", 2, torch.float32, graphs=True, **options)
    expected_losses, expected = _train("1f1b", 2, torch.float32, **options)
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected_losses]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_recorded_activations_take_the_memory_of_a_step_without_graphs() -> None:
    peaks = {}
    inputs, targets = larger_batch(16)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=8)
    for graphs in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        with pl.Pipeline(larger(8, 256), schedule, loss_fn=language_loss, graphs=graphs) as pipe:
            for _ in range(5):
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                pipe.step(inputs, targets)
                pipe_peak = torch.cuda.max_memory_allocated()
                for parameter in pipe.parameters():
                    parameter.grad = None
            held = torch.cuda.memory_reserved()
            peaks[graphs] = pipe_peak, before, held
        del pipe
    print(f"peak, held between steps, reserved: {peaks[False]} bytes without graphs, {peaks[True]} with them")
    # The pool of the recordings stays: it may be as large as the peak of a step, not as all micro-batches together.
    assert peaks[True][2] < 2.0 * peaks[False][2]


def test_gradients_of_several_steps_add_up() -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    inputs, targets = larger_batch(8)
    sums = []
    for graphs in (False, True):
        with pl.Pipeline(larger(2, 64), schedule, loss_fn=language_loss, transport="loopback", graphs=graphs) as pipe:
            for _ in range(5):
                pipe.step(inputs, targets)
            sums.append([parameter.grad.clone() for _, parameter in sorted(pipe.named_parameters())])
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_compile_workers")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_stages_are_near_plain_ones(dtype: torch.dtype, bound: float, graphs: bool) -> None:
    losses, gradients = _train("1f1b", 2, dtype, compile=True, graphs=graphs)
    expected_losses, expected = _train("1f1b", 2, dtype)
    for a, b in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=0)
    per_step = len(expected) // 6
    for a, b in zip(gradients[:per_step], expected[:per_step], strict=True):  # later ones are of other weights
        assert (a - b).norm() <= bound * b.norm(), float((a - b).norm() / b.norm())
