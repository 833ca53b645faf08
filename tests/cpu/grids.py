"""What tests of tensor-parallel grids share: blocks of tensors, and full ones from the blocks of all processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.parallel.placed import Place, Placed, place_parameter, placed
from pipeloom.parallel.tensor.grids.grid import Grid
from pipeloom.parallel.tensor.grids.shape import GridShape

SHAPES = [GridShape("2d", 2), GridShape("2d", 3), GridShape("2.5d", 2, 2), GridShape("3d", 2), GridShape("3d", 3)]

VOCABULARY, LENGTH = 31, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> bool:
    return bool((found - wanted).norm() <= tolerance * wanted.norm().clamp_min(1e-300))


def size(shape: GridShape) -> int:
    return torch.Size(shape.axes.values()).numel()


def own_samples(full: Tensor, grid: Grid, where) -> Tensor:
    return full.chunk(grid.shape.batch_blocks)[grid.place.member(where.batch)]


def cut(full: Tensor, grid: Grid, where) -> Tensor:
    """The block of activations [B, S, W]."""
    return own_samples(full, grid, where).chunk(grid.shape.side, -1)[grid.place.coordinates[where.width]].clone()


def block(full: Tensor, how: Placed, grid: Grid) -> nn.Parameter:
    """A placed parameter."""
    parameter = nn.Parameter(how.cut(full, grid.place))
    place_parameter(parameter, how, grid.place)
    return parameter


def gathered(blocks: list[tuple[Grid, Tensor]], where, full: Tensor) -> Tensor:
    """The full activations, from the blocks of all processes."""
    found = torch.full_like(full, float("nan"))
    for grid, block in blocks:
        own_samples(found, grid, where).chunk(grid.shape.side, -1)[grid.place.coordinates[where.width]].copy_(block)
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


def make_model(*, bias: bool = False, **options) -> GPT:
    """A GPT whose vocabulary no grid divides."""
    sizes = {"vocabulary_size": VOCABULARY, "width": 16, "heads": 4, "sequence_length": LENGTH, "layers": 2}
    config = GPTConfig(**{**sizes, **options})
    model = GPT(config)
    if bias:
        model.head.bias = nn.Parameter(torch.empty(config.vocabulary_size))
        for block in model.blocks:
            block.attention_norm, block.mlp_norm = nn.LayerNorm(config.width), nn.RMSNorm(config.width)
            for name in ("qkv", "attention_out", "mlp_up", "mlp_down"):
                linear = getattr(block, name)
                setattr(block, name, nn.Linear(linear.in_features, linear.out_features))
    init_parameters(model, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            else:
                parameter.mul_(8)
    return model.double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def on_grid(model: GPT, mesh: pl.Mesh, shape: GridShape) -> GPT:
    """The model on a grid, in place."""
    return pl.parallelize(model, mesh, layout=shape.layout, depth=shape.depth if shape.layout == "2.5d" else None)


def compare(found: list, model: nn.Module, *, sums: bool = True) -> None:
    """Every parameter's full gradient, from its blocks."""
    for name, parameter in model.named_parameters():
        blocks = [(place, dict(own.named_parameters())[name]) for place, own in found]
        assert torch.equal(owned(blocks, gradient=False), parameter.detach()), name
        if sums:
            sum_gradients(blocks)
        assert close(owned(blocks), parameter.grad), name
