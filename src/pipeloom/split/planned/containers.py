"""Values in dicts and lists: those that a module leaves in its arguments, and those of a message between stages."""

from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_CONTAINERS = (MutableMapping, list)
UNCHANGED = frozenset((Tensor, nn.Parameter, NoneType, bool, int, float, str, tuple, torch.Size))


def containers_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dicts and lists among the arguments of a call, which its module may change."""
    named = (*settings.items(), *((str(index), value) for index, value in enumerate(args)))
    # The type is asked first: whether an object is a mapping takes long to find out.
    return {name: value for name, value in named if type(value) not in UNCHANGED and isinstance(value, _CONTAINERS)}


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a dict or list that hold tensors."""
    items = container.items() if isinstance(container, MutableMapping) else enumerate(container)
    return {
        key: value
        for key, value in items
        if isinstance(key, str | int) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }


def each_once(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that differ, each by its first key; and for each other key, the first key of its value."""
    first: dict[int, str] = {}
    keys = {key: first.setdefault(id(value), key) for key, value in values.items()}
    once = {key: value for key, value in values.items() if keys[key] == key}
    return once, {key: other for key, other in keys.items() if key != other}


def all_of(once: Mapping[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The values that `each_once` took apart."""
    return {**once, **{key: once[first] for key, first in same.items()}}
