"""Tensor parallelism in 2D, 2.5D and 3D, in threads, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.placed import placed
from pipeloom.parallel.tensor.cross_entropy import token_losses
from pipeloom.parallel.tensor.grid import Grid
from pipeloom.parallel.tensor.grid_layers import GridLinear, GridNorm, Shards
from pipeloom.parallel.tensor.grid_shape import GridShape
from pipeloom.transport.thread_members import run_threads

SHAPES = [GridShape("2d", 2), GridShape("2d", 3), GridShape("2.5d", 2, 2), GridShape("3d", 2), GridShape("3d", 3)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> bool:
    return bool((found - wanted).norm() <= tolerance * wanted.norm().clamp_min(1e-300))


def size(shape: GridShape) -> int:
    return torch.Size(shape.axes.values()).numel()


def cut(full: Tensor, grid: Grid, where) -> Tensor:
    """The block of activations [B, S, W]."""
    own = grid.own_samples(full, where)
    return own.chunk(grid.shape.side, -1)[grid.place.coordinates[where.width]].clone()


def gathered(blocks: list[tuple[Grid, Tensor]], where, full: Tensor) -> Tensor:
    """The full activations, from the blocks of all processes."""
    found = torch.full_like(full, float("nan"))
    for grid, block in blocks:
        cut(found, grid, where)  # checks sizes
        grid.own_samples(found, where).chunk(grid.shape.side, -1)[grid.place.coordinates[where.width]].copy_(block)
    return found


def summed_gradient(blocks: list[tuple[Grid, nn.Parameter]]) -> Tensor:
    """The full gradient of a parameter: sums over the axes of `sum_over`, then each element from its owner."""
    how = placed(blocks[0][1])
    sums: dict[tuple[int, ...], Tensor] = {}
    for grid, parameter in blocks:
        kept = tuple(v for axis, v in grid.place.coordinates.items() if axis not in how.sum_over)
        sums[kept] = sums.get(kept, 0) + parameter.grad
    full = torch.full(how.shape, float("nan"), dtype=torch.float64)
    for grid, parameter in blocks:
        assert parameter.shape == how.local_shape(grid.place)
        kept = tuple(v for axis, v in grid.place.coordinates.items() if axis not in how.sum_over)
        how.join(sums[kept], grid.place, full, owned_only=True)
    return full


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
        own = Shards(grid).of(nn.Parameter(weight), shape.weight((outputs, inputs), source, target))
        own_bias = Shards(grid).of(nn.Parameter(vector), shape.vector(outputs, target)) if bias else None
        layer = GridLinear(own, own_bias, grid, source, target)
        own_x = cut(x, grid, source).requires_grad_()
        y = layer(own_x)
        y.backward(cut(dy, grid, target))
        return grid, own_x, y, layer

    results = run_threads(size(shape), work)
    full = [t.clone().requires_grad_() for t in (x, weight, vector)]
    wanted = F.linear(full[0], full[1], full[2] if bias else None)
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, _, y, _ in results], target, wanted.detach()), wanted.detach())
    assert close(gathered([(g, own_x.grad) for g, own_x, _, _ in results], source, x), full[0].grad)
    assert close(summed_gradient([(g, layer.weight) for g, _, _, layer in results]), full[1].grad)
    if bias:
        assert close(summed_gradient([(g, layer.bias) for g, _, _, layer in results]), full[2].grad)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_equal_one_process(shape: GridShape, centered: bool) -> None:
    B, S, width = 2 * shape.batch_blocks, 3, 4 * shape.side
    x, dy = drawn(B, S, width) + 2, drawn(B, S, width, seed=3)
    gain, bias = drawn(width, seed=1), drawn(width, seed=2)

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        how = shape.vector(width, shape.outer)
        own_bias = Shards(grid).of(nn.Parameter(bias), how) if centered else None
        norm = GridNorm(Shards(grid).of(nn.Parameter(gain), how), own_bias, grid, 1e-5, centered=centered)
        own_x = cut(x, grid, shape.outer).requires_grad_()
        y = norm(own_x)
        y.backward(cut(dy, grid, shape.outer))
        return grid, own_x, y, norm

    results = run_threads(size(shape), work)
    full = [t.clone().requires_grad_() for t in (x, gain, bias)]
    wanted = (
        F.layer_norm(full[0], [width], full[1], full[2]) if centered else F.rms_norm(full[0], [width], full[1], 1e-5)
    )
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, _, y, _ in results], shape.outer, x), wanted.detach())
    assert close(gathered([(g, own_x.grad) for g, own_x, _, _ in results], shape.outer, x), full[0].grad)
    assert close(summed_gradient([(g, norm.weight) for g, _, _, norm in results]), full[1].grad)
    if centered:
        assert close(summed_gradient([(g, norm.bias) for g, _, _, norm in results]), full[2].grad)


@pytest.mark.parametrize("vocabulary", [12, 7, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_embedding_equals_one_process(shape: GridShape, vocabulary: int) -> None:
    B, S, width = 2 * shape.batch_blocks, 3, 2 * shape.side**2
    table, dy = drawn(vocabulary, width), drawn(B, S, width, seed=3)
    ids = torch.randint(0, vocabulary, (B, S), generator=torch.Generator().manual_seed(4))

    def work():
        grid = Grid(pl.Mesh(tp=size(shape)), shape)
        own = Shards(grid).of(nn.Parameter(table), shape.weight((vocabulary, width), shape.outer, shape.inner))
        y = grid.embed(ids, own)
        y.backward(cut(dy, grid, shape.outer))
        return grid, y, own

    results = run_threads(size(shape), work)
    full = table.clone().requires_grad_()
    wanted = F.embedding(ids, full)
    wanted.backward(dy)
    assert close(gathered([(g, y.detach()) for g, y, _ in results], shape.outer, dy), wanted.detach())
    assert close(summed_gradient([(g, own) for g, _, own in results]), full.grad)


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

    results = run_threads(4, work)
    full = logits.clone().requires_grad_()
    wanted = F.cross_entropy(full, targets, reduction="none")
    wanted.backward(torch.arange(1.0, 7.0, dtype=torch.float64))
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    assert close(results[0][0], wanted.detach())
    found = torch.cat([gradient for _, gradient in results], -1)
    assert close(found[:, :vocabulary], full.grad)
    assert not found[:, vocabulary:].any()
