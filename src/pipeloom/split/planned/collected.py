"""Outputs that transformers collects from hooks inside a model, such as router logits of all layers."""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark on a model whose hooks are installed


def collector() -> dict[str, Any] | None:
    """What the running forward of a model of transformers collects into; None: nothing is collected."""
    module: Any = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else module._active_collector.get()


def collected_outputs(found: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists of a collector that are not empty."""
    return {key: list(values) for key, values in found.items() if isinstance(values, list) and values}


def collecting_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The forward hooks of a module that collect its output."""
    hooks = module._forward_hooks.values()
    return tuple(hook for hook in hooks if getattr(hook, "__name__", "") == "output_capturing_hook")


def install_hooks(model: nn.Module) -> None:
    """Install the hooks that collect, once, on the model itself; they do nothing until outputs are asked for.

    Copies of a model's containers would install them again.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return  # no part of the model is of transformers, whose import takes seconds
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in [part for part in model.modules() if isinstance(part, PreTrainedModel)]:
        if any(getattr(part, INSTALLED, False) for part in module.modules()):
            # A forward of a model inside has installed them; twice would collect twice.
            setattr(module, INSTALLED, True)
        else:
            maybe_install_capturing_hooks(module)


@contextmanager
def hooks_installed(model: nn.Module) -> Iterator[None]:
    """Inside the block, a model has the hooks that collect; afterwards the hooks that it had before."""
    before = [(part, set(part._forward_hooks), INSTALLED in vars(part)) for part in model.modules()]
    install_hooks(model)
    try:
        yield
    finally:
        for part, kept, was_installed in before:
            for key in part._forward_hooks.keys() - kept:
                del part._forward_hooks[key]
            if not was_installed:
                vars(part).pop(INSTALLED, None)


class HooksOnDemand:
    """Is transformers' mark on a stage's copies of a model's containers, and installs the hooks where it is read.

    transformers reads the mark in a forward that returns outputs of its layers. All other forwards call modules without
    hooks, which takes less time.

    Args:
        model: may be freed.
        modules: those that the stage runs, which have the hooks now.
    """

    __slots__ = ("_hooks", "_model")  # and no attributes, which a forward may change

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._model = weakref.ref(model)
        found = [(part, collecting_hooks(part), INSTALLED in vars(part)) for part in modules]
        self._hooks = [each for each in found if each[1] or each[2]]

    def __bool__(self) -> bool:
        model = self._model()
        if model is not None:
            install_hooks(model)
        for part, hooks, is_model in self._hooks:
            if not collecting_hooks(part):
                for hook in hooks:
                    part.register_forward_hook(hook)
            if is_model:
                vars(part)[INSTALLED] = True
        return True
