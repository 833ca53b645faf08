"""Tensor parallelism in 2D, 2.5D and 3D, in threads, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.tensor.cross_entropy import token_losses
from pipeloom.parallel.tensor.grids.grid import Grid
from pipeloom.parallel.tensor.grids.layers import GridLinear, GridLookUp, GridNorm
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.one_d.logits import VocabularyLogits
from pipeloom.parallel.tensor.one_d.vocabulary import Vocabulary
from tests.cpu.grids import SHAPES, block, close, cut, drawn, gathered, size, summed_gradient
from tests.cpu.pairwise import in_turn, of_grid


@pytest.mark.parametrize(("shape", "inward", "bias"), of_grid(SHAPES, [True, False], [False, True]), ids=str)
def test_a_linear_layer_equals_one_process(shape: GridShape, inward: bool, bias: bool) -> None:
    side = shape.side
    B, S, inputs, outputs = 2 * shape.batch_blocks, 3, 2 * side * side, 3 * side * side
    x, weight, vector, dy = (
        drawn(B, S, inputs),
        drawn(outputs, inputs, seed=1),
        drawn(outputs, seed=2),
        drawn(B, S, outputs, seed=3),
    )
    source, target = (shape.outer, shape.inner) if inward else (shape.inner, shape.outer)

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        own = block(weight, shape.weight((outputs, inputs), source, target), grid)
        own_bias = block(vector, shape.vector(outputs, target), grid) if bias else None
        layer = GridLinear(own, own_bias, grid, source, target)
        own_x = cut(x, grid, source).requires_grad_()
        y = layer(own_x)
        y.backward(cut(dy, grid, target))
        return grid, own_x, y, layer

    results = pl.run_threads(size(shape), work)
    full = [t.clone().requires_grad_() for t in (x, weight, vector)]
    wanted = F.linear(full[0], full[1], full[2] if bias else None)
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, _, y, _ in results], target, wanted.detach()), wanted.detach())
    assert close(gathered([(g, own_x.grad) for g, own_x, _, _ in results], source, x), full[0].grad)
    assert close(summed_gradient([(g.place, layer.weight) for g, _, _, layer in results]), full[1].grad)
    if bias:
        assert close(summed_gradient([(g.place, layer.bias) for g, _, _, layer in results]), full[2].grad)


@pytest.mark.parametrize(("shape", "centered"), in_turn(SHAPES, [True, False]), ids=str)
def test_norms_equal_one_process(shape: GridShape, centered: bool) -> None:
    B, S, width = 2 * shape.batch_blocks, 3, 4 * shape.side
    x, dy = drawn(B, S, width) + 2, drawn(B, S, width, seed=3)
    gain, bias = drawn(width, seed=1), drawn(width, seed=2)

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        how = shape.vector(width, shape.outer)
        own_bias = block(bias, how, grid) if centered else None
        norm = GridNorm(block(gain, how, grid), own_bias, grid, 1e-5, centered=centered)
        own_x = cut(x, grid, shape.outer).requires_grad_()
        y = norm(own_x)
        y.backward(cut(dy, grid, shape.outer))
        return grid, own_x, y, norm

    results = pl.run_threads(size(shape), work)
    full = [t.clone().requires_grad_() for t in (x, gain, bias)]
    wanted = (
        F.layer_norm(full[0], [width], full[1], full[2]) if centered else F.rms_norm(full[0], [width], full[1], 1e-5)
    )
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, _, y, _ in results], shape.outer, x), wanted.detach())
    assert close(gathered([(g, own_x.grad) for g, own_x, _, _ in results], shape.outer, x), full[0].grad)
    assert close(summed_gradient([(g.place, norm.weight) for g, _, _, norm in results]), full[1].grad)
    if centered:
        assert close(summed_gradient([(g.place, norm.bias) for g, _, _, norm in results]), full[2].grad)


@pytest.mark.parametrize(("shape", "vocabulary"), in_turn(SHAPES, [12, 7, 5]), ids=str)
def test_the_embedding_equals_one_process(shape: GridShape, vocabulary: int) -> None:
    B, S, width = 2 * shape.batch_blocks, 3, 2 * shape.side**2
    table, dy = drawn(vocabulary, width), drawn(B, S, width, seed=3)
    ids = torch.randint(0, vocabulary, (B, S), generator=torch.Generator().manual_seed(4))

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        own = block(table, shape.weight((vocabulary, width), shape.outer, shape.inner), grid)
        y = GridLookUp(grid, Vocabulary(vocabulary, grid.axis(shape.inner.width)))(ids, own)
        y.backward(cut(dy, grid, shape.outer))
        return grid, y, own

    results = pl.run_threads(size(shape), work)
    full = table.clone().requires_grad_()
    wanted = F.embedding(ids, full)
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, y, _ in results], shape.outer, dy), wanted.detach())
    assert close(summed_gradient([(g.place, own) for g, _, own in results]), full.grad)


@pytest.mark.parametrize("vocabulary", [12, 7, 5])
def test_cross_entropy_equals_one_process(vocabulary: int) -> None:
    logits, targets = drawn(6, vocabulary) * 30, torch.tensor([0, vocabulary - 1, 3, -100, 1, 2])
    padded = F.pad(logits, (0, -vocabulary % 4), value=1e3)

    def work():
        axis = pl.Mesh(tp=4).axis("tp")
        own = padded.chunk(4, -1)[axis.index].clone().requires_grad_()
        losses = token_losses(own, targets, axis, vocabulary)
        losses.backward(torch.arange(1.0, 7.0, dtype=torch.float64))
        with pytest.raises(InputError, match=f"targets have token id {vocabulary}"):
            token_losses(own, targets + 1, axis, vocabulary)
        return losses.detach(), own.grad

    results = pl.run_threads(4, work)
    full = logits.clone().requires_grad_()
    wanted = F.cross_entropy(full, targets, reduction="none")
    wanted.backward(torch.arange(1.0, 7.0, dtype=torch.float64))
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    assert close(results[0][0], wanted.detach())
    found = torch.cat([gradient for _, gradient in results], -1)
    assert close(found[:, :vocabulary], full.grad)
    assert not found[:, vocabulary:].any()


@pytest.mark.parametrize(("shape", "reduction"), in_turn(SHAPES, ["mean", "sum", "none"]), ids=str)
def test_the_loss_equals_one_process(shape: GridShape, reduction: str) -> None:
    B, S, vocabulary = 2 * shape.batch_blocks, 3, 7
    logits, weights = drawn(B, S, vocabulary), drawn(B * S, seed=1) if reduction == "none" else 1.0
    targets = torch.randint(0, vocabulary, (B * S,), generator=torch.Generator().manual_seed(4))
    targets[1::4] = -100
    padded = F.pad(logits, (0, -vocabulary % shape.side))

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        own = cut(padded, grid, shape.inner).requires_grad_()
        part = Vocabulary(vocabulary, grid.axis(shape.inner.width))
        wrapped = VocabularyLogits.of(own, part, grid.axis(*shape.inner.batch))
        loss = F.cross_entropy(wrapped.flatten(0, -2), targets, reduction=reduction)
        (loss * weights).sum().backward()
        assert torch.equal(wrapped.full(), logits)
        return grid, loss.detach(), own.grad

    results = pl.run_threads(size(shape), work)
    full = logits.clone().requires_grad_()
    wanted = F.cross_entropy(full.flatten(0, -2), targets, reduction=reduction)
    (wanted * weights).sum().backward()
    assert all(close(loss, wanted.detach()) for _, loss, _ in results)
    found = gathered([(grid, gradient) for grid, _, gradient in results], shape.inner, padded)
    assert close(found[..., :vocabulary], full.grad)
