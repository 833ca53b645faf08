"""What tests of tensor-parallel grids share: blocks of tensors, and full ones from the blocks of all processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeloom.parallel.placed import Place, placed
from pipeloom.parallel.tensor.grid import Grid
from pipeloom.parallel.tensor.grid_shape import GridShape

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


def owned(blocks: list[tuple[Place, nn.Parameter]], *, gradient: bool = True) -> Tensor:
    """The full gradient (or value) of a parameter, each element from its owner."""
    how = placed(blocks[0][1])
    full = torch.full(how.shape, float("nan"), dtype=torch.float64)
    for place, parameter in blocks:
        assert parameter.shape == how.local_shape(place)
        how.join(parameter.grad if gradient else parameter.detach(), place, full, owned_only=True)
    return full


def sum_gradients(blocks: list[tuple[Place, nn.Parameter]]) -> None:
    """Sums over the axes of `sum_over`, which a step takes at its end."""
    how = placed(blocks[0][1])
    sums: dict[tuple[int, ...], Tensor] = {}
    for place, parameter in blocks:
        kept = tuple(v for axis, v in place.coordinates.items() if axis not in how.sum_over)
        sums[kept] = sums.get(kept, 0) + parameter.grad
    for place, parameter in blocks:
        kept = tuple(v for axis, v in place.coordinates.items() if axis not in how.sum_over)
        parameter.grad = sums[kept].clone()


def summed_gradient(blocks: list[tuple[Place, nn.Parameter]]) -> Tensor:
    """The full gradient of a parameter, from the parts that processes have."""
    sum_gradients(blocks)
    return owned(blocks)
