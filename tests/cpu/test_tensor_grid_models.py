"""A GPT on grids of tensor-parallel processes, beside one process."""

from __future__ import annotations

import copy
from fnmatch import fnmatch

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.tensor.grid import Grid
from pipeloom.parallel.tensor.grid_layers import GridLoss
from pipeloom.parallel.tensor.grid_model import Role, cut_model
from pipeloom.parallel.tensor.grid_shape import GridShape
from tests.cpu.grids import close, owned, size, sum_gradients

SHAPES = [GridShape("2d", 2), GridShape("2.5d", 2, 2), GridShape("3d", 2)]
VOCABULARY, LENGTH = 31, 6


def make_model(*, bias: bool = False, **options) -> GPT:
    """A GPT whose vocabulary no grid divides."""
    config = GPTConfig(
        vocabulary_size=VOCABULARY, width=16, heads=4, sequence_length=LENGTH, **{"layers": 2, **options}
    )
    model = GPT(config)
    if bias:
        for block in model.blocks:
            block.attention_norm, block.mlp_norm = nn.LayerNorm(16), nn.RMSNorm(16)
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


def on_grid(model: GPT, mesh: pl.Mesh, shape: GridShape) -> Grid:
    grid, roles = Grid(mesh, shape), {}
    for name, _ in model.named_modules():
        for pattern, role in model.tensor_plan.items():
            if fnmatch(name, pattern):
                roles[name] = Role(role) if isinstance(role, str) else Role(*role)
    cut_model(model, grid, roles)
    return grid


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


def compare(found: list, model: nn.Module, *, sums: bool = True) -> None:
    """Every parameter's full gradient, from its blocks."""
    for name, parameter in model.named_parameters():
        blocks = [(place, dict(own.named_parameters())[name]) for place, own in found]
        assert torch.equal(owned(blocks, gradient=False), parameter.detach()), name
        if sums:
            sum_gradients(blocks)
        assert close(owned(blocks), parameter.grad), name
