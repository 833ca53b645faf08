"""Grids of tensor-parallel processes, over shared memory and over torch.distributed."""

from __future__ import annotations

import pytest
import torch

import pipeloom as pl
from pipeloom.models import loss_fn
from pipeloom.parallel.placed import placed
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.transport import shared_memory
from tests.cpu.grids import batch, close, make_model, on_grid, size
from tests.cpu.pairwise import in_turn
from tests.cpu.ranks import run_ranks


def work(rank: int, shape: GridShape):
    model = make_model(tie_embeddings=True)
    inputs, targets = batch(2 * shape.batch_blocks)
    with pl.Mesh(tp=size(shape)) as mesh:
        on_grid(model, mesh, shape)
        schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            value = pipe.step(inputs, targets)
        found = {name: (placed(p), p.grad.numpy()) for name, p in pipe.named_parameters()}
        return mesh.place, found, value.item()


@pytest.mark.parametrize(
    ("shape", "shares_memory"), in_turn([GridShape("2d", 2), GridShape("3d", 2)], [True, False]), ids=str
)
def test_processes_equal_one_process(monkeypatch: pytest.MonkeyPatch, shape: GridShape, shares_memory: bool) -> None:
    if not shares_memory:
        monkeypatch.setattr(shared_memory, "available", lambda: False)
    results = run_ranks(work, size(shape), shape)
    model = make_model(tie_embeddings=True)
    inputs, targets = batch(2 * shape.batch_blocks)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    assert [value for *_, value in results] == pytest.approx([loss.item()] * size(shape), rel=1e-12)
    for name, parameter in model.named_parameters():
        full = torch.full_like(parameter, float("nan"))
        for place, found, _ in results:
            how, gradient = found[name]
            how.join(torch.from_numpy(gradient), place, full, owned_only=True)
        assert close(full, parameter.grad), name
