"""`StageModule`: a stage that runs consecutive layers of a model."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn

# Runs a block under activation recomputation: ``run(modules, block, *args, **kwargs)`` returns the result of
# ``block(*args, **kwargs)``; `modules` are the modules that the block runs.
BlockRunner = Callable[..., Any]


class _Running(threading.local):
    """The layer that runs in this thread, or ran last; None: unknown."""

    layer: nn.Module | None = None


running = _Running()


class LayerObserver(Protocol):
    """Callbacks around the layers of a stage. Unlike forward hooks, they survive the replacement of a layer."""

    def before(self, index: int) -> None:
        """Called before layer `index` runs."""

    def after(self, index: int, value: Any) -> None:
        """Called after layer `index` returned `value`."""


class _Namespace(nn.Module):
    """A container that gives the layers of a stage the same fully qualified names as in the model."""

    sliceable = True  # see `pipeloom.slicing.make_sliceable`


class StageModule(nn.Module):
    """A stage of consecutive layers: the model's own module objects, under the same names.

    A layer may be replaced after the split (compiled, checkpoint-wrapped, sharded) by setting the attribute.

    Args:
        layers: fully qualified names and modules, in execution order.
        blocks: names of the repeated layers, which activation recomputation applies to; None: all.
    """

    sliceable = True
    canonical_names: dict[str, str]
    observer: LayerObserver | None = None

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], blocks: Iterable[str] | None = None) -> None:
        super().__init__()
        layers = list(layers)
        self.canonical_names = {}
        # Layers are looked up by name in each forward, so that a replacement takes effect.
        self._chain = tuple(self.place(name, module) for name, module in layers)
        names = None if blocks is None else set(blocks)
        self._is_block = tuple(names is None or name in names for name, _ in layers)

    def place(self, name: str, module: nn.Module) -> tuple[dict[str, nn.Module | None], str]:
        """Register `module` under its fully qualified name; returns the ``_modules`` dictionary and the key in it."""
        container, _, last = name.rpartition(".")
        home = self.namespace(container)
        home.add_module(last, module)
        return home._modules, last

    def namespace(self, name: str) -> nn.Module:
        """The module of this stage with the name of one of the model's containers, made where it is missing."""
        found: nn.Module = self
        for part in name.split(".") if name else ():
            if part not in found._modules:
                found.add_module(part, _Namespace())
            found = found.get_submodule(part)
        return found

    def forward(self, value: Any, run: BlockRunner | None = None) -> Any:
        """Run the layers. Each takes the previous layer's output as its only argument, as in nn.Sequential.

        Args:
            value: the output of the previous stage: a tensor, tuple or dict.
            run: runs the blocks; by default they are called directly. Without an observer, consecutive blocks that are
                leaf modules (linear layers and activations of an nn.Sequential) form one block, since each of them
                alone saves little more than its input.
        """
        observer = self.observer
        if observer is None:
            if run is not None:
                return run_blocks([modules[name] for modules, name in self._chain], self._is_block, value, run)
            for modules, name in self._chain:
                running.layer = modules[name]
                value = modules[name](value)  # type: ignore[misc]
            return value
        for index, (modules, name) in enumerate(self._chain):
            layer: Any = modules[name]
            running.layer = layer
            observer.before(index)
            value = layer(value) if run is None or not self._is_block[index] else run([layer], layer, value)
            observer.after(index, value)
        return value


def is_of_stage(module: nn.Module) -> bool:
    """Whether a module is a stage or a container of its layers, and none of the model."""
    return isinstance(module, StageModule | _Namespace)


def composite_blocks(stage: StageModule) -> list[nn.Module]:
    """The blocks of a stage that have modules of their own, in order."""
    layers = [modules[name] for modules, name in stage._chain]
    found = zip(layers, stage._is_block, strict=True)
    return [layer for layer, repeats in found if repeats and layer is not None and layer._modules]


def run_blocks(layers: Sequence[Any], is_block: Sequence[bool], value: Any, run: BlockRunner) -> Any:
    """Run layers in order, blocks through `run`; see `StageModule.forward`."""
    leaves: list[Any] = []  # consecutive leaf modules, which form one block
    for layer, repeats in zip(layers, is_block, strict=True):
        if repeats and not layer._modules:
            leaves.append(layer)
            continue
        value, leaves = _run_leaves(leaves, value, run), []
        running.layer = layer
        value = run([layer], layer, value) if repeats else layer(value)
    return _run_leaves(leaves, value, run)


def _run_leaves(leaves: list[Any], value: Any, run: BlockRunner) -> Any:
    def chain(value: Any) -> Any:
        for leaf in leaves:
            running.layer = leaf
            value = leaf(value)
        return value

    return run(leaves, chain, value) if leaves else value


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module's forward only runs its children in order."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module) and not any(hooks)


def may_change_input(module: nn.Module) -> bool:
    """Whether a submodule works in place, which autograd forbids on a leaf tensor that requires a gradient."""
    return any(getattr(part, "inplace", False) is True for part in module.modules())
