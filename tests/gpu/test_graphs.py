"""CUDA graphs and torch.compile: the numbers of a pipeline without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from tests.cpu.reference import language_loss
from tests.gpu.gpt import larger, larger_batch


def _train(name: str, num_ranks: int, dtype: torch.dtype, **options) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of six steps with updates: the third is recorded, the next are replayed."""
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    inputs, targets = larger_batch(48)
    losses, gradients = [], []
    with pl.Pipeline(larger(4, 64).to(dtype), schedule, loss_fn=language_loss, transport="loopback", **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(6):
            part = slice(8 * step, 8 * step + 8)
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
