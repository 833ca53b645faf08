"""Cuts the layers of a model between the processes of a grid, in place."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.placed import Placed
from pipeloom.parallel.tensor.grid import Grid
from pipeloom.parallel.tensor.grid_layers import GridLinear, GridLookUp, GridNorm, Shards
from pipeloom.parallel.tensor.grid_shape import GridShape

Sections = tuple[tuple[int, int], ...]  # (features, heads) of parts that are cut one by one


class Role(NamedTuple):
    """What a layer is for.

    Attributes:
        kind: "column" (from activations between blocks to those within), "row" (back) or "vocabulary" (an embedding of
            tokens or a head).
        sections: of the outputs of "column", of the inputs of "row"; None: one section without heads.
    """

    kind: str
    sections: Sections | None = None


def cut_model(model: nn.Module, grid: Grid, roles: Mapping[str, Role]) -> None:
    """Replace linear layers and norms by those of a grid, and their parameters by this process's blocks.

    Args:
        model: linear layers, embeddings with a function `look_up`, `nn.LayerNorm` and `nn.RMSNorm` along the width.
            Other layers must have no parameters, and work with any batch size and any number of heads.
        roles: by module name, of all linear layers and embeddings.

    Raises:
        InputError: sizes that the grid does not divide, or a layer with parameters that has no form on a grid. The
            model is then as before.
    """
    found = list(_layers(model, roles))
    for name, module, role in found:
        _check(name, module, role, grid.shape)
    shards = Shards(grid)
    for name, module, role in found:
        if role is not None and not isinstance(module, nn.Linear):
            _cut_embedding(module, shards)
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _layer(module, role, shards))


def _layers(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[tuple[str, Any, Role | None]]:
    """All modules with parameters of their own."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield name, module, roles.get(name)


def _check(name: str, module: Any, role: Role | None, shape: GridShape) -> None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and role is None:
        if len(module.normalized_shape) != 1:
            raise InputError(f"norm {name} has {len(module.normalized_shape)} dimensions: layout {shape} needs one.")
        shape.check_divides(module.normalized_shape[0], shape.side, "width", name)
        return
    if role is not None and role.kind == "vocabulary" and hasattr(module, "look_up"):
        shape.check_divides(module.weight.shape[1], shape.input_blocks, "width", name)
        return
    if role is None or not isinstance(module, nn.Linear):
        raise InputError(
            f"layer {name} of type {type(module).__name__}: layout {shape} has linear layers with a role in the plan, "
            "norms and token embeddings. Use layout 1d."
        )
    for _, heads in role.sections or ():
        shape.check_divides(heads, shape.side, "heads", name)
    shape.check_divides(module.in_features, shape.input_blocks, "in_features", name)
    if role.kind != "vocabulary":
        shape.check_divides(module.out_features, shape.input_blocks, "out_features", name)


def _layer(module: Any, role: Role | None, shards: Shards) -> nn.Module:
    """The form of a linear layer or a norm on the grid."""
    grid, shape = shards.grid, shards.grid.shape
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        how = shape.vector(module.normalized_shape[0], shape.outer)
        bias = getattr(module, "bias", None)
        centered = isinstance(module, nn.LayerNorm)
        return GridNorm(shards.of(module.weight, how), shards.of(bias, how), grid, module.eps, centered=centered)
    assert role is not None  # `_check`
    source, target = (shape.inner, shape.outer) if role.kind == "row" else (shape.outer, shape.inner)
    parts = [size for size, _ in role.sections] if role.sections and role.kind == "column" else None
    weight = shards.of(module.weight, shape.weight((module.out_features, module.in_features), source, target, parts))
    assert weight is not None
    bias = None if module.bias is None else shards.of(module.bias, shape.vector(module.out_features, target, parts))
    return GridLinear(weight, bias, grid, source, target)


def _cut_embedding(module: Any, shards: Shards) -> None:
    shape, (vocabulary_size, width) = shards.grid.shape, module.weight.shape
    module.weight = shards.of(module.weight, shape.weight((vocabulary_size, width), shape.outer, shape.inner))
    module.look_up = GridLookUp(shards.grid, vocabulary_size)
    positions = getattr(module, "positions", None)
    if positions is not None:
        how: Placed = shape.positions(*positions.shape)
        module.positions = shards.of(positions, how)
