"""`Layout`: how tensor-parallel ranks share the layers of a model. One class per layout. And what layouts share."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.tensor.plan import Entry
from pipeloom.slicing.attention import TokenDropout
from pipeloom.slicing.dropout_parts import DropoutParts


class Layout(ABC):
    """Puts the parallel forms of layers in their places."""

    @abstractmethod
    def apply(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Cut the modules of `entries` in place, and say of all other parameters that need it how they lie.

        Raises:
            InputError: a module cannot be cut this way.
        """


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of the module of this full name, in its mode."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    new.train(owner.get_submodule(child).training)
    owner._modules[child] = new


def linear_parts(name: str, module: nn.Module, kind: str) -> tuple[nn.Parameter, nn.Parameter | None, bool]:
    """Weight, bias, and whether the weight is [in, out]: of nn.Linear, or ``Conv1D`` of transformers.

    Raises:
        InputError: another module.
    """
    transposed = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not transposed and type(module).forward is not nn.Linear.forward:
        raise InputError(
            f"plan has {name!r}: {kind!r}: {type(module).__name__} is no layer that can be cut this way. Name an "
            "nn.Linear, or an nn.Embedding for 'vocabulary'."
        )
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    return weight, bias, transposed


def split_dropouts(model: nn.Module, parts: DropoutParts, *, attention: Collection[str]) -> None:
    """Let dropouts draw the masks of one process, and take the part of this process.

    Args:
        parts: of dropouts between cut layers, and of attention weights.
        attention: names of the modules whose attention has a part of the heads.
    """
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if type(child) is nn.Dropout:
                module._modules[key] = TokenDropout(child.p).train(child.training)
    for name, module in model.named_modules():
        own: Any = parts if name in attention else parts._replace(weights={})
        module.dropout_parts = own
