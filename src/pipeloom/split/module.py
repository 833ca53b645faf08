"""`StageModule`: some of a model's layers, run one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn


class LayerObserver(Protocol):
    """Is told when the layers of a stage run, whichever modules they are by then."""

    def before(self, index: int) -> None:
        """In front of a layer."""

    def after(self, index: int, value: Any) -> None:
        """Behind a layer, which returned `value`."""


class _Namespace(nn.Module):
    """Holds the members of one stage of a ModuleList or another container, under their names in the model."""

    sliceable = True  # see `pipeloom.slicing.make_sliceable`


class StageModule(nn.Module):
    """A contiguous piece of a model: the same module objects, under the same names, run one after another.

    A layer may be replaced after the cut (compiled, checkpoint-wrapped, sharded) by setting the attribute.
    """

    sliceable = True
    canonical_names: dict[str, str]
    observer: LayerObserver | None = None

    def __init__(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.canonical_names = {}
        # Looked up by name at each call, so that a replaced layer is the one that runs.
        self._chain = tuple(self.place(name, module) for name, module in layers)

    def place(self, name: str, module: nn.Module) -> tuple[dict[str, nn.Module | None], str]:
        """Hold `module` under its fully qualified name; returns where: a dictionary and the key in it."""
        *containers, last = name.split(".")
        parent: nn.Module = self
        for part in containers:
            if part not in parent._modules:
                parent.add_module(part, _Namespace())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)
        return parent._modules, last

    def forward(self, value: Any) -> Any:
        """Run the layers; `value` (a tensor, tuple or dict) is passed on as one argument, as nn.Sequential does."""
        observer = self.observer
        for index, (modules, name) in enumerate(self._chain):
            if observer is not None:
                observer.before(index)
            value = modules[name](value)  # type: ignore[misc]
            if observer is not None:
                observer.after(index, value)
        return value
