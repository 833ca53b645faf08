"""`ModelArguments`: what a stage is given, as the keyword arguments of the model's forward."""

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

FIRST = ""  # the key of the model's first argument, given without a name
_COUNT = "num_items_in_batch"  # differs from batch to batch, and is only divided by
_CONSTANTS = (bool, int, float, str, NoneType)


class ModelArguments:
    """The arguments of a model.

    Args:
        forward: of the model.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._signature = inspect.signature(forward)
        parameters = self._signature.parameters
        self._names = frozenset(parameters)
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def of(self, value: Any) -> dict[str, Any]:
        """The keyword arguments that a value is: a dict of these, a tuple of all needed ones, or the first of them."""
        if isinstance(value, Tensor):
            return {FIRST: value}
        if isinstance(value, Mapping) and (self._takes_any or self._names.issuperset(value)):
            return dict(value)
        if isinstance(value, tuple):
            needed = [
                name
                for name, each in self._signature.parameters.items()
                if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and each.default is inspect.Parameter.empty
            ]
            if 1 < len(needed) <= len(value):
                return dict(self._signature.bind(*value).arguments)
        return {FIRST: value}


def form_of(inputs: Mapping[str, Any], *, shapes: bool) -> list[Any]:
    """What the way of values through a forward may depend on: the structure of its arguments, and constants.

    Args:
        inputs: keyword arguments of the model.
        shapes: whether it may depend on those of the tensors.
    """
    kinds: list[Any] = []
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name != _COUNT:
            kinds.append((name, value.shape if shapes else None))
        elif isinstance(value, _CONSTANTS) and name != _COUNT:
            kinds.append((name, type(value), value))
        elif name != _COUNT:
            leaves, structure = tree_flatten(value)
            kinds.append((name, structure, *(_kind(leaf) for leaf in leaves)))
    return kinds


def _kind(leaf: Any) -> Any:
    """What the way of values through a forward may depend on of a value inside of an argument."""
    return leaf.shape if isinstance(leaf, Tensor) else (type(leaf), leaf if isinstance(leaf, _CONSTANTS) else None)
