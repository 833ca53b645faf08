"""Outputs that transformers collects from hooks inside a model, such as router logits of all layers."""

import sys
from typing import Any

from torch import nn

_INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark on a model whose hooks are installed


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
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:
        return
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in models:
        if any(getattr(part, _INSTALLED, False) for part in module.modules()):
            setattr(
                module, _INSTALLED, True
            )  # a forward of a model inside has installed them; twice would collect twice
        else:
            maybe_install_capturing_hooks(module)
