"""What is in the attributes of a module, to see whether a forward changes them."""

from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))  # parameters, submodules, hooks, mode
_PLAIN = (bool, int, float, complex, str, bytes)
_DEPTH = 6  # of containers and objects inside an attribute


def contents_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies of attributes, with the containers and objects in them."""
    seen: set[int] = set()
    return {name: _copied(value, seen, _DEPTH) for name, value in attributes.items() if name not in OF_TORCH}


def _copied(value: Any, seen: set[int], depth: int) -> Any:
    fields = None
    if not isinstance(value, (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)):
        fields = getattr(value, "__dict__", None)
    if not depth or id(value) in seen or (fields is None and not isinstance(value, (list, tuple, deque, dict, set))):
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        return _Copy(value, {key: _copied(each, seen, depth - 1) for key, each in list(value.items())})
    if isinstance(value, set):
        return _Copy(value, set(value))
    if isinstance(value, (list, tuple, deque)):
        return _Copy(value, [_copied(each, seen, depth - 1) for each in value])
    return _Copy(value, {key: _copied(each, seen, depth - 1) for key, each in list((fields or {}).items())})


class _Copy(NamedTuple):
    """A container or object, and what was in it."""

    of: Any
    inside: Any


def same(now: Any, before: Any) -> bool:
    """Whether two results of `contents_of`, or values in them, are equal: tensors and other objects by identity."""
    if isinstance(now, _Copy) and isinstance(before, _Copy):
        if type(now.of) is not type(before.of) or len(now.inside) != len(before.inside):
            return False
        if isinstance(now.inside, dict):
            return all(key in before.inside and same(each, before.inside[key]) for key, each in now.inside.items())
        if isinstance(now.inside, set):
            return bool(now.inside == before.inside)
        return all(same(*each) for each in zip(now.inside, before.inside, strict=True))
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)
