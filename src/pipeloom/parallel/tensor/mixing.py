"""Modules that read all features of a cut layer at once: cut between two linear layers, they would compute otherwise.

gate, up ── activation ── down        each feature by itself: cut between gate, up and down
gate ── x - mean(x) ── down           features are mixed: gate gathers its outputs, down takes its part
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.parallel.tensor.layout import linear_parts


def mixes_features(module: nn.Module, columns: Collection[str], rows: Collection[str]) -> bool:
    """Whether an input of a row layer depends on features of column layers at other places.

    The module's forward runs on a random input. Column layers return random features, and row layers keep their inputs:
    no parameter of them is read. Modules whose forward needs more than one input are not examined.

    Args:
        module: its forward takes one tensor.
        columns, rows: names of linear layers in the module.
    """
    if not columns or not rows or _num_required(module) != 1:
        return False
    features: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    drawn = torch.Generator().manual_seed(0)
    width = _outputs(module, next(iter(columns)))
    replaced: dict[str, Any] = {name: _Source(features, name, _outputs(module, name), drawn) for name in columns}
    replaced |= {name: _Sink(kept, _outputs(module, name)) for name in rows}
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in replaced}
    before = {name: vars(layer).get("forward") for name, layer in layers.items()}
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False  # no dropout: it would draw from the generator of the program
        for name, layer in layers.items():
            layer.forward = replaced[name]
        module(torch.randn(1, 3, _inputs(module, next(iter(columns))), generator=drawn))
        return any(_reads_others(features, each, width, drawn) for each in kept)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return False  # it needs what it does not have here: parameters on another device, other inputs
    finally:
        for part in training:
            part.training = True
        for name, layer in layers.items():
            vars(layer).pop("forward", None)
            if before[name] is not None:
                layer.forward = before[name]


def _reads_others(features: dict[str, Tensor], result: Tensor, width: int, drawn: torch.Generator) -> bool:
    """Whether the first half of the last dimension depends on the second half of features of the same width."""
    if result.shape[-1] != width or not result.requires_grad:
        return False
    sources = [each for each in features.values() if each.shape[-1] == width]
    half = result[..., : width // 2]
    weights = torch.randn(half.shape, generator=drawn)
    found = torch.autograd.grad(half, sources, weights, allow_unused=True)
    return any(each is not None and bool(each[..., width // 2 :].ne(0).any()) for each in found)


def _num_required(module: nn.Module) -> int:
    code = type(module).forward.__code__
    return code.co_argcount - 1 - len(type(module).forward.__defaults__ or ())


def _outputs(module: nn.Module, name: str) -> int:
    weight, _, transposed = linear_parts(name, module.get_submodule(name), "column")
    return weight.shape[int(transposed)]


def _inputs(module: nn.Module, name: str) -> int:
    weight, _, transposed = linear_parts(name, module.get_submodule(name), "column")
    return weight.shape[1 - int(transposed)]


class _Source:
    """The forward of a column layer: features that are leaves of the graph."""

    def __init__(self, features: dict[str, Tensor], name: str, width: int, drawn: torch.Generator) -> None:
        self._features, self._name, self._width, self._drawn = features, name, width, drawn

    def __call__(self, x: Tensor) -> Tensor:
        found = torch.randn(*x.shape[:-1], self._width, generator=self._drawn, requires_grad=True)
        self._features[self._name] = found
        return found


class _Sink:
    """The forward of a row layer: keeps its input, and returns zeros."""

    def __init__(self, kept: list[Tensor], width: int) -> None:
        self._kept, self._width = kept, width

    def __call__(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        return x.new_zeros(*x.shape[:-1], self._width)
