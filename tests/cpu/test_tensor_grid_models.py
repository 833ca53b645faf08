"""A GPT on grids of tensor-parallel processes, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import product, starmap
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.engine.binders import sequence_slices
from pipeloom.models import loss_fn
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.one_d.logits import VocabularyLogits
from pipeloom.slicing.context import SliceContext
from tests.cpu.grids import LENGTH, batch, close, compare, make_model, on_grid, owned, size

SHAPES = [GridShape("2d", 2), GridShape("2.5d", 2, 2), GridShape("3d", 2)]
VARIANTS = {
    "rotary": {},
    "learned": {"positions": "learned", "bias": True},
    "tied": {"tie_embeddings": True},
    "tied and learned": {"tie_embeddings": True, "positions": "learned"},
    "grouped": {"kv_heads": 2, "bias": True},
}


def _in_turn(values: Iterable[Any]) -> list[Any]:
    """Every value on the grid of four ranks, every other one on each grid of eight: all of them in whole grids."""
    cells = []
    for (row, shape), (column, value) in product(enumerate(SHAPES), enumerate(values)):
        marks = () if size(shape) == 4 or (row + column) % 2 else pytest.mark.whole_grid
        cells.append(pytest.param(shape, value, marks=marks, id=f"{shape}-{value}"))
    return cells


@pytest.mark.parametrize(("shape", "variant"), _in_turn(VARIANTS))
def test_a_gpt_equals_one_process(shape: GridShape, variant: str) -> None:
    model = make_model(**VARIANTS[variant])
    inputs, targets = batch(2 * shape.batch_blocks)

    def work():
        own = copy.deepcopy(model)
        mesh = pl.Mesh(tp=size(shape))
        loss = loss_fn(on_grid(own, mesh, shape)(inputs), targets)
        loss.backward()
        return mesh.place, own, loss.detach()

    results = pl.run_threads(size(shape), work)
    wanted = loss_fn(model(inputs), targets)
    wanted.backward()
    for _, _, loss in results:
        assert close(loss, wanted.detach())
    compare([(place, own) for place, own, _ in results], model)


CASES = {
    "1f1b": ({}, {}),
    "interleaved": ({"num_chunks": 2}, {}),
    "zb-v": ({"num_chunks": 2}, {"recompute": "full"}),
    "dualpipev": ({"num_chunks": 2}, {}),
    "zb-h1": ({}, {"recompute": "selective"}),
    "seq1f1b": ({"num_slices": 2}, {}),
}


RECOMPUTING = [family for family, (_, options) in CASES.items() if "recompute" in options]  # others: the matrix


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        *_in_turn(RECOMPUTING),
        *(
            pytest.param(shape, family, marks=pytest.mark.whole_grid, id=f"{shape}-{family}")
            for shape, family in product(SHAPES, CASES)
            if family not in RECOMPUTING
        ),
    ],
)
def test_a_pipeline_on_a_grid_equals_one_process(shape: GridShape, family: str) -> None:
    sizes, options = CASES[family]
    model = make_model(tie_embeddings=True, kv_heads=2, layers=4 if "num_chunks" in sizes else 2)
    inputs, targets = batch(4 * shape.batch_blocks)
    schedule = pl.schedules.build(family, num_ranks=2, num_microbatches=4, **sizes)

    def work():
        mesh, own = pl.Mesh(pp=2, tp=size(shape)), copy.deepcopy(model)
        on_grid(own, mesh, shape)
        with pl.Pipeline(own, schedule, loss_fn=loss_fn, mesh=mesh, **options) as pipe:
            losses = pipe.evaluate(inputs, targets), pipe.step(inputs, targets)
            return mesh.place, dict(pipe.named_parameters()), losses

    results = pl.run_threads(2 * size(shape), work)
    wanted = loss_fn(model(inputs), targets)
    wanted.backward()
    for _, _, losses in results:
        assert all(close(loss, wanted.detach()) for loss in losses)
    for name, parameter in model.named_parameters():
        blocks = [(place, own[name]) for place, own, _ in results if name in own]
        assert close(owned(blocks), parameter.grad), name


UPDATED = {("2d", "zero3"), ("3d", "ddp")}  # other pairs once: the matrix


def _cell(shape: GridShape, data: str, updates: int):
    marks = () if (shape.layout, data) in UPDATED and updates == 2 else pytest.mark.whole_grid
    return pytest.param(shape, data, updates, marks=marks, id=f"{shape}-{data}-{updates}")


@pytest.mark.parametrize(
    ("shape", "data", "updates"), list(starmap(_cell, product(SHAPES, ("ddp", "zero1", "zero3"), (2, 20))))
)
def test_updates_on_a_grid_equal_one_process(shape: GridShape, data: str, updates: int) -> None:
    model = make_model(tie_embeddings=data != "zero1", positions="learned").float()
    inputs, targets = batch(4 * shape.batch_blocks)
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)

    def work():
        mesh, own = pl.Mesh(dp=2, tp=size(shape)), copy.deepcopy(model)
        on_grid(own, mesh, shape)
        with pl.Pipeline(own, schedule, loss_fn=loss_fn, mesh=mesh, data=data) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, eps=1e-5)
            samples = [part.chunk(2)[mesh.coordinate("dp")] for part in (inputs, targets)]
            losses = []
            for _ in range(updates):
                losses.append(pipe.step(*samples).item())
                pl.clip_grad_norm(pipe, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return losses, pipe.state_dict()

    results = pl.run_threads(2 * size(shape), work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    for step in range(updates):
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert all(losses[step] == pytest.approx(loss.item(), rel=1e-5) for losses, _ in results), step
    for name, value in model.state_dict().items():
        assert all(close(state[name], value, 1e-4) for _, state in results), name


@pytest.mark.parametrize(("shape", "slices"), _in_turn([[LENGTH], [2, 4]]))
def test_dropout_masks_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, shape: GridShape, slices: list[int]
) -> None:
    model = make_model(dropout=0.2, positions="learned")
    inputs, targets = batch(2 * shape.batch_blocks)
    family, sizes = ("1f1b", {}) if len(slices) == 1 else ("seq1f1b", {"num_slices": 2})
    schedule = pl.schedules.build(family, num_ranks=1, num_microbatches=2, **sizes)
    monkeypatch.setattr(sequence_slices, "SliceContext", lambda seed: SliceContext((7, *seed[1:])))

    def train(own, mesh):
        with pl.Pipeline(own, schedule, loss_fn=loss_fn, mesh=mesh, slices=slices) as pipe:
            return pipe.step(inputs, targets)

    def work():
        mesh, own = pl.Mesh(tp=size(shape)), copy.deepcopy(model)
        on_grid(own, mesh, shape)
        return mesh.place, own, train(own, mesh)

    results = pl.run_threads(size(shape), work)
    wanted = train(model, None)
    assert all(close(loss, wanted) for *_, loss in results)
    compare([(place, own) for place, own, _ in results], model, sums=False)


def test_a_context_of_several_ranks_on_a_grid_equals_one_process() -> None:
    model, shape = make_model(positions="learned"), SHAPES[0]
    inputs, targets = (part[:, :4] for part in batch(4))
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)

    def work():
        mesh, own = pl.Mesh(cp=2, tp=4), copy.deepcopy(model)
        with pl.Pipeline(on_grid(own, mesh, shape), schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            return mesh.place, dict(pipe.named_parameters()), pipe.step(inputs, targets)

    results = pl.run_threads(8, work)
    wanted = loss_fn(model(inputs), targets)
    wanted.backward()
    assert all(close(loss, wanted.detach()) for *_, loss in results)
    for name, parameter in model.named_parameters():
        assert close(owned([(place, own[name]) for place, own, _ in results]), parameter.grad), name


def test_outputs_are_those_of_one_process() -> None:
    model, shape = make_model(), SHAPES[1]
    inputs, _ = batch(2 * shape.batch_blocks)
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)

    def work():
        mesh, own = pl.Mesh(tp=size(shape)), copy.deepcopy(model)
        with pl.Pipeline(on_grid(own, mesh, shape), schedule, mesh=mesh) as pipe:
            found = pipe.forward(inputs)
            return found.full() if isinstance(found, VocabularyLogits) else found

    wanted = model(inputs).detach()
    for found in pl.run_threads(size(shape), work):
        assert close(found, wanted)


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        pytest.param(shape, family, marks=() if (shape.layout == "2.5d") == (turn == 1) else pytest.mark.whole_grid)
        for shape, (turn, family) in product(SHAPES, enumerate(("pipedream", "pipedream-2bw")))
    ],
    ids=str,
)
def test_streams_on_a_grid_update_as_without(shape: GridShape, family: str) -> None:
    model, (inputs, targets) = make_model(tie_embeddings=False), batch(4 * shape.batch_blocks)
    schedule = pl.schedules.build(family, num_ranks=2, num_microbatches=8)  # enough to repeat

    def work(tp: int):
        mesh, own = pl.Mesh(pp=2, tp=tp), copy.deepcopy(model)
        if tp > 1:
            on_grid(own, mesh, shape)
        with pl.Pipeline(own, schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            stream = pl.Stream(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01, eps=1e-3), max_norm=0.3)
            updates = stream.run([(inputs, targets)] * 4)
            return [(update.loss, update.grad_norm) for update in updates]

    wanted = torch.tensor(pl.run_threads(2, lambda: work(1))[0])
    for found in pl.run_threads(2 * size(shape), lambda: work(size(shape))):
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-9)
