"""`StageModule`: some of a model's layers, run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn

# How a stage runs a block where not as it is: ``run(modules, block, *args, **kwargs)`` returns what
# ``block(*args, **kwargs)`` does; `modules` are those that the block runs, for who wants to look into them.
BlockRunner = Callable[..., Any]


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

    Args:
        layers: fully qualified names and modules.
        blocks: the names of the layers that repeat, those worth to be recomputed; None: all.
    """

    sliceable = True
    canonical_names: dict[str, str]
    observer: LayerObserver | None = None

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], blocks: Iterable[str] | None = None) -> None:
        super().__init__()
        layers = list(layers)
        self.canonical_names = {}
        # Looked up by name at each call, so that a replaced layer is the one that runs.
        self._chain = tuple(self.place(name, module) for name, module in layers)
        names = set(blocks) if blocks is not None else {name for name, _ in layers}
        self._is_block = tuple(name in names for name, _ in layers)

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

    def forward(self, value: Any, run: BlockRunner | None = None) -> Any:
        """Run the layers; `value` (a tensor, tuple or dict) is passed on as one argument, as nn.Sequential does.

        Args:
            value: of the layer before.
            run: runs the blocks; by default they are called. Where nobody observes layers, those of one module each (an
                nn.Sequential of linear layers and activations) are together one block: each alone keeps little beside
                its input.
        """
        observer = self.observer
        if observer is None:
            if run is not None:
                return run_blocks([modules[name] for modules, name in self._chain], self._is_block, value, run)
            for modules, name in self._chain:
                value = modules[name](value)  # type: ignore[misc]
            return value
        for index, (modules, name) in enumerate(self._chain):
            layer: Any = modules[name]
            observer.before(index)
            value = layer(value) if run is None or not self._is_block[index] else run([layer], layer, value)
            observer.after(index, value)
        return value


def run_blocks(layers: Sequence[Any], is_block: Sequence[bool], value: Any, run: BlockRunner) -> Any:
    """One layer after another, blocks by `run`; see `StageModule.forward`."""
    leaves: list[Any] = []  # of one module each, which wait to become a block
    for layer, repeats in zip(layers, is_block, strict=True):
        if repeats and not layer._modules:
            leaves.append(layer)
            continue
        value = _run_leaves(leaves, value, run)
        leaves = []
        value = run([layer], layer, value) if repeats else layer(value)
    return _run_leaves(leaves, value, run)


def _run_leaves(leaves: list[Any], value: Any, run: BlockRunner) -> Any:
    def chain(value: Any) -> Any:
        for leaf in leaves:
            value = leaf(value)
        return value

    return run(leaves, chain, value) if leaves else value


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether running a module is running its children one after another, and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module) and not any(hooks)
