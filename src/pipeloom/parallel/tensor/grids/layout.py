"""The layouts "2d", "2.5d" and "3d": the form of each layer on a grid of processes.

kind in the plan         activations                       weight [outputs, inputs]
column                   `outer` -> `inner`                both dimensions, see `GridShape`
row                      `inner` -> `outer`                both dimensions
vocabulary, last layer   `outer` -> `inner`                both dimensions, outputs padded
vocabulary, embedding    token ids -> `outer`              as the last layer, so that they may be tied
norms                    `outer` -> `outer`                width
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import Placed
from pipeloom.parallel.tensor.grids.grid import Grid
from pipeloom.parallel.tensor.grids.layers import GridLinear, GridLookUp, GridNorm
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.layout import Layout, replace_module, split_dropouts
from pipeloom.parallel.tensor.one_d.cutting import Cutter
from pipeloom.parallel.tensor.one_d.vocabulary import Vocabulary, VocabularyEmbedding
from pipeloom.parallel.tensor.plan import Entry
from pipeloom.slicing.dropout_parts import DropoutParts
from pipeloom.transport.thread_members import ThreadMembers

_KINDS = ("column", "row", "vocabulary")


class OnGrid(Layout):
    """A layout on a grid; see the module.

    Layers that are neither cut nor norms must have no parameters, and work with any number of samples and heads.

    Args:
        mesh: its axis tp is divided into the grid.
        shape: of the grid.

    Attributes:
        grid: as this process sees it; the mesh is divided into it when all layers are known to fit.
    """

    grid: Grid
    _cutter: Cutter

    def __init__(self, mesh: Mesh, shape: GridShape) -> None:
        self._mesh, self._shape = mesh, shape
        self._threads = isinstance(mesh.members, ThreadMembers)

    def apply(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        found = list(_layers(model, entries))
        for name, module, entry in found:
            _check(name, module, entry, self._shape)
        self.grid = Grid(self._mesh, self._shape)
        self._cutter = Cutter(self._mesh)
        for name, module, entry in found:
            if entry is None:
                replace_module(model, name, self._norm(name, module))
            elif isinstance(module, nn.Linear):
                replace_module(model, name, self._linear(name, module, entry))
            else:
                self._embedding(model, name, module)
        self._share_dropouts(model, entries)

    def _norm(self, name: str, module: Any) -> nn.Module:
        how = self.grid.shape.vector(module.normalized_shape[0], self.grid.shape.outer)
        weight, bias = (self._block(getattr(module, key, None), how, f"{name}.{key}") for key in ("weight", "bias"))
        return GridNorm(weight, bias, self.grid, module.eps, centered=isinstance(module, nn.LayerNorm))

    def _linear(self, name: str, module: Any, entry: Entry) -> nn.Module:
        shape = self.grid.shape
        source, target = (shape.inner, shape.outer) if entry.kind == "row" else (shape.outer, shape.inner)
        parts = [size for size, _ in entry.sections] if entry.sections and entry.kind == "column" else None
        how = shape.weight((module.out_features, module.in_features), source, target, parts)
        weight = self._cutter.block_of(module.weight, how, f"{name}.weight")
        bias = self._block(module.bias, shape.vector(module.out_features, target, parts), f"{name}.bias")
        vocabulary = Vocabulary(module.out_features, self.grid.axis(target.width))
        last = vocabulary if entry.kind == "vocabulary" else None
        return GridLinear(weight, bias, self.grid, source, target, last)

    def _embedding(self, model: nn.Module, name: str, module: Any) -> None:
        shape, (size, width) = self.grid.shape, module.weight.shape
        how = shape.weight((size, width), shape.outer, shape.inner)
        block = self._cutter.block_of(module.weight, how, f"{name}.weight")
        look_up = GridLookUp(self.grid, Vocabulary(size, self.grid.axis(shape.inner.width)))
        if isinstance(module, nn.Embedding):
            replace_module(model, name, VocabularyEmbedding(block, look_up))
            return
        module.weight, module.look_up = block, look_up
        positions = getattr(module, "positions", None)
        if positions is not None:
            module.positions = self._block(positions, shape.positions(*positions.shape), f"{name}.positions")

    def _block(self, full: nn.Parameter | None, how: Placed, name: str) -> nn.Parameter | None:
        return None if full is None else self._cutter.block_of(full, how, name)

    def _share_dropouts(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        shape, place = self.grid.shape, self.grid.place
        values, weights = (
            {0: (place.member(where.batch), shape.batch_blocks), dim: (place.coordinates[where.width], shape.side)}
            for where, dim in ((shape.outer, 2), (shape.inner, 1))
        )
        parents = {name.rpartition(".")[0] for name, entry in entries.items() if entry.kind == "column"}
        split_dropouts(model, DropoutParts(values, weights, self._threads), attention=parents)


def _layers(model: nn.Module, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Any, Entry | None]]:
    """All modules with parameters of their own."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield name, module, entries.get(name)


def _check(name: str, module: Any, entry: Entry | None, shape: GridShape) -> None:
    if entry is None and type(module) in (nn.LayerNorm, nn.RMSNorm):
        if len(module.normalized_shape) != 1:
            raise InputError(
                f"norm {name} is over {len(module.normalized_shape)} dimensions, with layout {shape}: must be 1. Use "
                "layout 1d."
            )
        shape.check_divides(module.normalized_shape[0], shape.side, "width", name)
        return
    embedding = hasattr(module, "look_up") or _plain(module)
    if entry is not None and entry.kind == "vocabulary" and type(module) is nn.Embedding and not embedding:
        raise InputError(
            f"embedding {name} has padding_idx, max_norm, scale_grad_by_freq or sparse, which layout {shape} does not "
            "support. Turn these off, or use layout 1d."
        )
    if entry is None or entry.kind not in _KINDS or entry.halves or not (type(module) is nn.Linear or embedding):
        kind = "no kind in the plan" if entry is None else f"kind {entry.kind!r}"
        raise InputError(
            f"layer {name} of type {type(module).__name__} has {kind}: with layout {shape} every layer with parameters "
            f"must be a norm, or a linear layer or embedding of kind {', '.join(_KINDS)}. Use layout 1d."
        )
    if embedding:
        shape.check_divides(module.weight.shape[1], shape.input_blocks, "width", name)
        return
    for _, heads in entry.sections or ():
        shape.check_divides(heads, shape.side, "heads", name)
    shape.check_divides(module.in_features, shape.input_blocks, "in_features", name)
    if entry.kind != "vocabulary":
        shape.check_divides(module.out_features, shape.side, "out_features", name)


def _plain(module: nn.Module) -> bool:
    """Whether it is an embedding without options that change results."""
    return type(module) is nn.Embedding and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse or module.padding_idx is not None
    )
