"""A GPT on grids of tensor-parallel processes, beside one process."""

from __future__ import annotations

import copy

import pytest

import pipeloom as pl
from pipeloom.models import loss_fn
from pipeloom.parallel.tensor.grid_layers import GridLoss
from pipeloom.parallel.tensor.grid_shape import GridShape
from tests.cpu.grids import VOCABULARY, batch, close, compare, make_model, on_grid, owned, size

SHAPES = [GridShape("2d", 2), GridShape("2.5d", 2, 2), GridShape("3d", 2)]
VARIANTS = {
    "rotary": {},
    "learned": {"positions": "learned", "bias": True},
    "tied": {"tie_embeddings": True},
    "tied and learned": {"tie_embeddings": True, "positions": "learned"},
    "grouped": {"kv_heads": 2, "bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gpt_equals_one_process(shape: GridShape, variant: str) -> None:
    model = make_model(**VARIANTS[variant])
    inputs, targets = batch(2 * shape.batch_blocks)

    def work():
        own = copy.deepcopy(model)
        grid = on_grid(own, pl.Mesh(tp=size(shape)), shape)
        loss = GridLoss(grid, VOCABULARY)(own(inputs), targets)
        loss.backward()
        return grid.place, own, loss.detach()

    results = pl.run_threads(size(shape), work)
    wanted = loss_fn(model(inputs), targets)
    wanted.backward()
    for _, _, loss in results:
        assert close(loss, wanted.detach())
    compare([(place, own) for place, own, _ in results], model)


@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pipeline_on_a_grid_equals_one_process(shape: GridShape, family: str) -> None:
    model = make_model(tie_embeddings=True, kv_heads=2, layers=4)
    inputs, targets = batch(4 * shape.batch_blocks)
    chunks = {"num_chunks": 2} if family == "zb-v" else {}
    schedule = pl.schedules.build(family, num_ranks=2, num_microbatches=4, **chunks)

    def work():
        mesh, own = pl.Mesh(pp=2, tp=size(shape)), copy.deepcopy(model)
        loss = GridLoss(on_grid(own, mesh, shape), VOCABULARY)
        with pl.Pipeline(own, schedule, loss_fn=loss, mesh=mesh) as pipe:
            value = pipe.evaluate(inputs, targets), pipe.step(inputs, targets)
            return mesh.place, dict(pipe.named_parameters()), value

    results = pl.run_threads(2 * size(shape), work)
    wanted = loss_fn(model(inputs), targets)
    wanted.backward()
    for _, _, losses in results:
        assert all(close(loss, wanted.detach()) for loss in losses)
    for name, parameter in model.named_parameters():
        blocks = [(place, own[name]) for place, own, _ in results if name in own]
        assert close(owned(blocks), parameter.grad), name
