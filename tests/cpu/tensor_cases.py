"""A GPT on tensor-parallel ranks that are threads, and what one process computes: loss and full gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.placed import Placed, placed_block
from tests.cpu.reference import accumulate

SAMPLES, TOKENS, MICROBATCHES = 4, 12, 4
SIZES: dict[str, Any] = {"vocabulary_size": 30, "layers": 4, "width": 16, "heads": 4, "sequence_length": TOKENS}


class Result(NamedTuple):
    """What a run found.

    Attributes:
        loss: of the step.
        gradients: full, by canonical name.
        traffic: of rank 0, (calls, bytes) by collective.
    """

    loss: float
    gradients: dict[str, Tensor]
    traffic: dict[str, tuple[int, int]]


def config(**sizes: Any) -> GPTConfig:
    return GPTConfig(**{**SIZES, "tie_embeddings": False, **sizes})


def build(sizes: GPTConfig) -> GPT:
    """In float64, with larger values than at the start of training, so that every part of a gradient counts."""
    model = GPT(sizes).double()
    init_parameters(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def drawn(model: nn.Module) -> nn.Module:
    """`model` with weights from a generator of its own, equal on all threads."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def batch(vocabulary_size: int = 30, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    row = torch.randint(0, vocabulary_size, (SAMPLES, tokens + 1), generator=generator)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def one_process(
    model: nn.Module, loss: Callable[..., Tensor] = loss_fn, num_microbatches: int = MICROBATCHES
) -> Result:
    inputs, targets = batch()
    total = accumulate(model, loss, inputs, targets, num_microbatches)
    return Result(total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, {})


def on_mesh(function: Callable[[pl.Mesh], Any], **degrees: int) -> list[Any]:
    """Call `function` in a thread per process of a mesh."""

    def work() -> Any:
        with pl.Mesh(**degrees) as mesh:
            return function(mesh)

    return pl.run_threads(math.prod(degrees.values()), work, timeout_seconds=60.0)


def run(
    model: Callable[[], nn.Module],
    schedule: str = "gpipe",
    *,
    sequence: bool = False,
    plan: Any = None,
    loss: Callable[..., Tensor] = loss_fn,
    schedule_options: dict[str, Any] | None = None,
    pipeline_options: dict[str, Any] | None = None,
    **degrees: int,
) -> Result:
    """One step on a mesh of threads; gradients of all ranks put together by `Placed.join`."""

    def work(mesh: pl.Mesh) -> Any:
        whole = pl.parallelize(model(), mesh, plan, sequence=sequence)
        made = pl.schedules.build(
            schedule, num_ranks=mesh.degree("pp"), num_microbatches=MICROBATCHES, **(schedule_options or {})
        )
        inputs, targets = batch()
        size, replica = SAMPLES // mesh.degree("dp"), mesh.coordinate("dp")
        inputs, targets = (part[replica * size :][:size] for part in (inputs, targets))
        with pl.Pipeline(whole, made, loss_fn=loss, mesh=mesh, **(pipeline_options or {})) as pipe:
            mesh.meter.traffic.clear()
            value = pipe.step(inputs, targets)
            pieces = [
                (name, None if (block := placed_block(p)) is None else tuple(block), p.grad)
                for name, p in pipe.named_parameters()
                if p.grad is not None
            ]
            traffic = {kind: (found.calls, found.num_bytes) for (_, kind), found in mesh.meter.traffic.items()}
        return value.item(), pieces, traffic

    found = on_mesh(work, **degrees)
    losses = [value for value, _, _ in found]
    assert max(losses) - min(losses) <= 1e-12 * abs(losses[0]), losses
    return Result(losses[0], joined(pieces for _, pieces, _ in found), found[0][2])


def joined(ranks: Any) -> dict[str, Tensor]:
    """Full gradients. Elements that several ranks hold must be equal on all of them."""
    full: dict[str, Tensor] = {}
    for name, block, gradient in (piece for pieces in ranks for piece in pieces):
        if block is None:
            how, place = Placed(tuple(gradient.shape)), None
            if name in full:
                assert torch.allclose(full[name], gradient, rtol=1e-12, atol=1e-14), name
            full[name] = gradient
            continue
        how, place = block
        target = full.setdefault(name, torch.full(how.shape, torch.nan, dtype=gradient.dtype))
        for there, here, _ in how.pieces(place):
            known = ~target[there].isnan()
            assert torch.allclose(target[there][known], gradient[here][known], rtol=1e-12, atol=1e-14), name
        how.join(gradient, place, target)
    return full


def assert_equal(found: Result, expected: Result, tolerance: float = 1e-12) -> None:
    """Loss and every gradient, relative to its largest element."""
    assert abs(found.loss - expected.loss) <= tolerance * abs(expected.loss), (found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        difference = (found.gradients[name] - gradient).abs().max().item()
        assert difference <= tolerance * gradient.abs().max().item(), (name, difference)  # NaN where none joined
