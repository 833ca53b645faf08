"""Values in dicts and lists, which a module leaves in its arguments or stages send; zeros in the form of a value."""

import sys
from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

_CONTAINERS = (MutableMapping, list)
_SENT = (tuple, list, dict)
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


def has_tensors(value: Any) -> bool:
    """Whether the value is a tensor, or a dict, list or tuple with tensors."""
    return isinstance(value, Tensor) or (
        isinstance(value, dict | list | tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    )


def each_once(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that differ, each by its first key; and for each other key, the first key of its value."""
    first: dict[int, str] = {}
    keys = {key: first.setdefault(id(value), key) for key, value in values.items()}
    once = {key: value for key, value in values.items() if keys[key] == key}
    return once, {key: other for key, other in keys.items() if key != other}


def all_of(once: Mapping[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The values that `each_once` took apart."""
    return {**once, **{key: once[first] for key, first in same.items()}}


def classes_of(value: Any, place: str = "") -> dict[str, str]:
    """The classes of the named tuples in a value, by place: stages send them as plain tuples.

    Classes that are not found by name, such as those that a function defines, are left out.
    """
    if isinstance(value, Tensor) or not isinstance(value, _SENT):
        return {}
    found: dict[str, str] = {}
    kind = type(value)
    if hasattr(value, "_fields") and not isinstance(value, PackedSequence):
        name = f"{kind.__module__}:{kind.__qualname__}"
        found |= {place: name} if _class_named(name) is kind else {}
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        found |= classes_of(each, f"{place}/{key}")
    return found


def with_classes(value: Any, classes: Mapping[str, str], place: str = "") -> Any:
    """A value that arrived, with the classes of `classes_of`."""
    if isinstance(value, Tensor | PackedSequence) or not isinstance(value, _SENT):
        return value
    if isinstance(value, dict):
        return {key: with_classes(each, classes, f"{place}/{key}") for key, each in value.items()}
    items = [with_classes(each, classes, f"{place}/{index}") for index, each in enumerate(value)]
    if place in classes:
        return _class_named(classes[place])._make(items)
    return items if isinstance(value, list) else tuple(items)


def _class_named(name: str) -> Any:
    """A class of a module that this process has loaded."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def views_of(value: Any) -> Any:
    """The value with other tensor objects, over the same memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), value)


Format = torch.dtype | None


def format_of(module: nn.Module) -> Format:
    """The dtype of a module's floating-point parameters: of the first one. None: there are none."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)


def shaped_like_result(
    twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any], formats: tuple[Format, Format] = (None, None)
) -> Any:
    """Zeros in the shapes that a module would return, without computing anything.

    Args:
        twin: the module, without memory.
        args, settings: of the call.
        formats: results of the first dtype get the second.
    """
    result = _shaped_like_result(twin, args, settings)
    before, now = formats
    if now in (None, before):
        return result
    return tree_map_only(Tensor, lambda t: t.to(now) if t.dtype == before else t, result)


def _shaped_like_result(twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor)]
    device = given[0].device if given else torch.device("cpu")
    table = getattr(twin, "weight", None)
    if isinstance(table, Tensor) and (isinstance(twin, nn.Embedding) or hasattr(twin, "look_up")) and given:
        return torch.zeros(*given[0].shape, table.shape[1], dtype=table.dtype, device=device)
    with torch.no_grad():
        to_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, settings))
        result = twin(*to_meta[0], **to_meta[1])
    return zeros_like(result, device)


def zeros_like(value: Any, device: torch.device | None = None) -> Any:
    """The value with zeros in place of its tensors; a PackedSequence keeps the lengths of its sequences."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence(zeros(leaf.data), *(None if each is None else each.clone() for each in leaf[1:]))
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device or leaf.device)

    return tree_map_only((Tensor, PackedSequence), zeros, value, is_leaf=lambda each: isinstance(each, PackedSequence))
