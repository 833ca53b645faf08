"""A small model whose parameters the tests place themselves: of all kinds that layers have, in full or in blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import init_parameters
from pipeloom.parallel.axis_functions import copy_to, reduce_from
from pipeloom.parallel.placed import Cut, Placed, Section, even, place_parameter
from pipeloom.transport.thread_members import run_threads

WIDTH, INNER, STAGES, MICROBATCHES, SAMPLES = 6, 8, 2, 4, 8
TP = ("tp",)


class Block(nn.Module):
    """x + down(fused projections of a normed x): [B, WIDTH] -> [B, WIDTH].

    fused    INNER queries, cut in two; INNER / 2 keys, which the halves of the queries share: no block of their own
    gain     whole on every process, which has the part of its gradient that comes through its own projections
    bias     whole, with its full gradient
    """

    def __init__(self, mesh: pl.Mesh | None = None) -> None:
        super().__init__()
        self.axis = mesh.axis("tp") if mesh is not None and mesh.degree("tp") > 1 else None
        parts = 1 if self.axis is None else self.axis.degree
        assert parts in (1, 2)
        self.fused = nn.Parameter(torch.empty(INNER // parts + INNER // 2, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, INNER // parts))
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        if mesh is not None and self.axis is not None:
            sections = (Section(INNER, 2), Section(INNER // 2, 1))
            place = mesh.place
            fused = Placed((INNER + INNER // 2, WIDTH), {0: Cut(TP, sections)}, sum_over=TP)
            place_parameter(self.fused, fused, place)
            place_parameter(self.down, Placed((WIDTH, INNER), {1: even(INNER, 2, TP)}), place)
            place_parameter(self.gain, Placed((WIDTH,), sum_over=TP), place)

    def forward(self, x: Tensor) -> Tensor:
        own = x if self.axis is None else copy_to(x, self.axis)
        own = own * self.gain
        queries, keys = (own @ self.fused.T).split([self.fused.shape[0] - INNER // 2, INNER // 2], -1)
        mixed = torch.tanh(queries) * keys.repeat(1, queries.shape[-1] // keys.shape[-1])
        y = mixed @ self.down.T
        return x + (y if self.axis is None else reduce_from(y, self.axis)) + self.bias


class Table(nn.Module):
    """Ids [B] -> rows [B, WIDTH] of a table of 5, cut along its rows into padded blocks."""

    def __init__(self, mesh: pl.Mesh | None = None) -> None:
        super().__init__()
        self.axis = mesh.axis("tp") if mesh is not None and mesh.degree("tp") > 1 else None
        rows = 5 if self.axis is None else 3
        self.weight = nn.Parameter(torch.empty(rows, WIDTH))
        self.first = 0 if self.axis is None else 3 * self.axis.index
        if mesh is not None and self.axis is not None:
            how = Placed((5, WIDTH), {0: even(5, 2, TP)}, padded={0: 3})
            place_parameter(self.weight, how, mesh.place)

    def forward(self, ids: Tensor) -> Tensor:
        if self.axis is None:
            return self.weight[ids]
        own = (ids >= self.first) & (ids < self.first + 3)
        found = self.weight[torch.where(own, ids - self.first, 0)] * own[:, None]
        return reduce_from(found, self.axis)


def build(mesh: pl.Mesh | None = None) -> list[nn.Module]:
    """The stages, with the same values in every layout."""
    blocks = [Block(mesh) for _ in range(STAGES)]
    stages: list[nn.Module] = [nn.Sequential(Table(mesh), blocks[0]), nn.Sequential(blocks[1])]
    for stage in stages:
        stage.double()
        init_parameters(stage, seed=3)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    return stages


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(5, (SAMPLES,), generator=generator)
    return ids, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(mesh: pl.Mesh | None = None, schedule: str = "1f1b", **options: object) -> pl.Pipeline:
    count = 2 * MICROBATCHES if schedule == "pipedream-2bw" else MICROBATCHES  # which needs a steady state
    made = pl.schedules.build(schedule, num_ranks=STAGES, num_microbatches=count)
    return pl.Pipeline(build(mesh), made, loss_fn=loss_fn, mesh=mesh, **options)  # type: ignore[arg-type]


def own_batch(pipe: pl.Pipeline, step: int = 0) -> tuple[Tensor, Tensor]:
    """This replica's part of a batch."""
    mesh = pipe.mesh
    dp, replica = (1, 0) if mesh is None else (mesh.degree("dp"), mesh.coordinate("dp"))
    inputs, targets = batch(step)
    size = SAMPLES // dp
    return inputs[replica * size :][:size], targets[replica * size :][:size]


def on_mesh(function: Callable[[pl.Mesh], object], **degrees: int) -> list[object]:
    """Call `function` in a thread per process of a mesh."""
    size = 1
    for degree in degrees.values():
        size *= degree

    def work() -> object:
        with pl.Mesh(**degrees) as mesh:
            return function(mesh)

    return run_threads(size, work, timeout_seconds=60.0)
