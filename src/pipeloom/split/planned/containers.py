"""Values in dicts and lists: those that a module leaves in its arguments, and those of a message between stages."""

from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_CONTAINERS = (MutableMapping, list)
_UNCHANGED = (Tensor, NoneType, bool, int, tuple)  # asked first: the other question is slow


def containers_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dicts and lists among the arguments of a call, which its module may change."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, _UNCHANGED) and isinstance(value, _CONTAINERS):
            found[name] = value
    for index, value in enumerate(args):
        if not isinstance(value, _UNCHANGED) and isinstance(value, _CONTAINERS):
            found[str(index)] = value
    return found


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
