"""A small model with a layer of experts, all of which see every row: in full, or cut along axes ep and tp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import init_parameters
from pipeloom.parallel.axis_functions import copy_to, exchange, reduce_from
from pipeloom.parallel.placed import Placed, even, place_parameter

WIDTH, INNER, EXPERTS, SAMPLES, MICROBATCHES = 6, 8, 4, 32, 4  # samples of a batch of all replicas
EP, TP = ("ep",), ("tp",)


class Experts(nn.Module):
    """x + the sum over experts of softmax(router x) * down(tanh(up x)): [B, WIDTH] -> [B, WIDTH].

    router    dense
    up        [EXPERTS, INNER, WIDTH] and
    down      [EXPERTS, WIDTH, INNER], cut by experts along ep, and along tp by INNER
    first     [EXPERTS, WIDTH], of which forwards read row 0 alone: other processes along ep find no gradient
    """

    def __init__(self, mesh: pl.Mesh | None, *, has_first: bool) -> None:
        super().__init__()
        ep, tp = (1, 1) if mesh is None else (mesh.degree("ep"), mesh.degree("tp"))
        own, inner = EXPERTS // ep, INNER // tp
        self.ep = mesh.axis("ep") if mesh is not None and ep > 1 else None
        self.tp = mesh.axis("tp") if mesh is not None and tp > 1 else None
        self.router = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.up = nn.Parameter(torch.empty(own, inner, WIDTH))
        self.down = nn.Parameter(torch.empty(own, WIDTH, inner))
        self.first = nn.Parameter(torch.empty(own, WIDTH)) if has_first else None
        if mesh is not None and ep * tp > 1:
            place, cut = mesh.expert_place, {0: even(EXPERTS, ep, EP)}
            up = Placed((EXPERTS, INNER, WIDTH), {**cut, 1: even(INNER, tp, TP)})
            down = Placed((EXPERTS, WIDTH, INNER), {**cut, 2: even(INNER, tp, TP)})
            place_parameter(self.up, up, place)
            place_parameter(self.down, down, place)
            if self.first is not None:
                place_parameter(self.first, Placed((EXPERTS, WIDTH), cut), place)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(x @ self.router.T, -1)
        rows = x.expand(EXPERTS, *x.shape)
        if self.ep is not None:
            rows = exchange(rows, self.ep, 0, 1)
        if self.tp is not None:
            rows = copy_to(rows, self.tp)
        found = torch.tanh(rows @ self.up.mT) @ self.down.mT
        if self.tp is not None:
            found = reduce_from(found, self.tp)
        if self.first is not None and (self.ep is None or self.ep.index == 0):
            found = torch.cat([found[:1] + self.first[0], found[1:]])
        if self.ep is not None:
            found = exchange(found, self.ep, 1, 0)
        return x + (gates.T[..., None] * found).sum(0)


class Dense(nn.Module):
    """tanh of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


def build(
    mesh: pl.Mesh | None = None, *, stages: int = 2, dtype: torch.dtype = torch.float64, has_first: bool = False
) -> nn.Sequential:
    """A dense layer and one of experts per stage, with the same values in every layout."""
    made = nn.Sequential(*(part for _ in range(stages) for part in (Dense(), Experts(mesh, has_first=has_first))))
    made.double()
    init_parameters(made, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    return made.to(dtype)


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Of all replicas."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, targets


def own_batch(mesh: pl.Mesh | None, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """This replica's part of a batch."""
    if mesh is None:
        return batch(step, dtype)
    inputs, targets = (part.chunk(mesh.degree("dp"))[mesh.coordinate("dp")] for part in batch(step, dtype))
    return inputs, targets


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(
    mesh: pl.Mesh | None = None,
    schedule: str = "1f1b",
    *,
    ranks: int = 2,
    stages: int | None = None,
    dtype: torch.dtype = torch.float64,
    has_first: bool = False,
    **options: Any,
) -> pl.Pipeline:
    """On `ranks` per replica; `stages`: pairs of layers, by default one per stage."""
    made = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=MICROBATCHES)
    model = build(mesh, stages=stages or made.num_stages, dtype=dtype, has_first=has_first)
    return pl.Pipeline(model, made, loss_fn=loss_fn, mesh=mesh, **options)


def on_mesh(function: Callable[[pl.Mesh], Any], **degrees: int) -> list[Any]:
    """Call `function` in a thread per process of a mesh."""
    size = 1
    for axis, degree in degrees.items():
        size *= 1 if axis == "ep" else degree

    def work() -> Any:
        with pl.Mesh(**degrees) as mesh:
            return function(mesh)

    return pl.run_threads(size, work, timeout_seconds=60.0)
