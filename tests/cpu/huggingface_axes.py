"""Families of transformers inside a stage: layers cut along tp, experts along ep, by the families' own plans."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
import pipeloom.autograd.grouped_linear  # reads the true float32 when it is imported
from pipeloom.parallel.placed import placed_block
from tests.cpu.huggingface_families import batch, families, loss_of

NUM_MICROBATCHES = 2
DEGREES = {"tp": {"tp": 2}, "ep": {"dp": 2, "ep": 2}}


def families_with(axis: str) -> list[str]:
    """The model types that have a pipeline plan and a plan for the axis."""
    return [kind for kind, config in families().items() if getattr(config, f"base_model_{axis}_plan", None)]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Norms, routers and rotary tables that compute in float32 do so in float64."""
    single, cast = torch.float32, Tensor.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32 = torch.float = single  # type: ignore[misc]
        Tensor.float = cast  # type: ignore[method-assign]


def accumulated(model: nn.Module, inputs: dict[str, Tensor], pieces: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model's own accumulation over equal micro-batches."""
    total = 0.0
    for index in range(pieces):
        piece = {name: value.tensor_split(pieces)[index] for name, value in inputs.items()}
        loss = loss_of(model(**piece, use_cache=False), piece["input_ids"]) / pieces
        loss.backward()
        total += loss.item()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, found


def axis_difference(model: nn.Module, axis: str) -> float:
    """The largest difference of loss and gradients on two processes along an axis, relative to the largest value.

    The stages of zb-v follow one another on each process.
    """
    inputs = batch(4)
    with float64_throughout():
        loss, gradients = accumulated(model, inputs, NUM_MICROBATCHES * DEGREES[axis].get("dp", 1))
        models = [copy.deepcopy(model) for _ in range(2)]

        def work() -> Any:
            with pl.Mesh(**DEGREES[axis]) as mesh:
                own = pl.parallelize(models.pop(), mesh)
                built = pl.schedules.build("zb-v", num_ranks=1, num_microbatches=NUM_MICROBATCHES)
                replica, replicas = mesh.coordinate("dp"), mesh.degree("dp")
                given = {name: value.tensor_split(replicas)[replica] for name, value in inputs.items()}
                with pl.Pipeline(own, built, loss_fn=loss_of, mesh=mesh) as pipe:
                    value = pipe.step(given, given["input_ids"]).item()
                    return value, [(name, placed_block(p), p.grad) for name, p in pipe.named_parameters()]

        found = pl.run_threads(2, work, timeout_seconds=100)
    worst = max(abs(value - loss) / abs(loss) for value, _ in found)
    return max(worst, *(_difference(pieces, gradients) for _, pieces in found))


def _difference(pieces: list[tuple[str, Any, Tensor | None]], gradients: dict[str, Tensor]) -> float:
    largest = max(each.abs().max().item() for each in gradients.values())
    worst = 0.0
    for name, block, gradient in pieces:
        whole = gradients.get(name)
        if whole is None:
            worst = max(worst, 0.0 if gradient is None else gradient.abs().max().item() / largest)
            continue
        wanted = whole if block is None else block.cut(whole)
        if wanted.numel():
            apart = (wanted if gradient is None else gradient - wanted).abs().max().item()
            worst = max(worst, apart / max(whole.abs().max().item(), 1e-3 * largest))
    return worst


def rounding(model: nn.Module) -> float:
    """By how much gradients of the model itself change when its weights change by their last digit."""
    other, inputs = copy.deepcopy(model), batch(4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.mul_(1 + 2 * torch.finfo(parameter.dtype).eps * noise)
    with float64_throughout():
        _, gradients = accumulated(model, inputs, NUM_MICROBATCHES)
        _, changed = accumulated(other, inputs, NUM_MICROBATCHES)
    return _difference([(name, None, each) for name, each in changed.items()], gradients)
