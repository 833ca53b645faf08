"""The parts of a model of transformers without a plan, from its module tree: repeated blocks, and what is around them.

    embeddings                    a part, since it has parameters of its own
    encoder.layer.0 .. n          blocks: members of one class, with a large part of the parameters
    pooler, classifier            parts
    embed_tokens, used twice      no part: every stage has it

Containers call their modules in the order in which their forward names them. This is a guess. A forward that runs parts
in another order is refused in the first step.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
_USE = re.compile(r"\bself\.(\w+)\b(?!\.(?:weight|bias)\b)")
_SHARE = 0.25  # of the largest list's parameters: smaller lists are no blocks


class Parts(NamedTuple):
    """What a model consists of.

    Attributes:
        patterns: names of the parts in order; members of lists of blocks as ``*``.
        everywhere: names of the modules with parameters that every stage needs.
    """

    patterns: tuple[str, ...]
    everywhere: frozenset[str]


def detected_parts(model: nn.Module) -> Parts | None:
    """The parts of a model; None: it has no repeated blocks, or is none of transformers."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return None
    lists = {name: sum(p.numel() for p in part.parameters()) for name, part in _lists(model, "")}
    largest = max(lists.values(), default=0)
    blocks = {name for name, size in lists.items() if size >= _SHARE * largest}
    if not blocks:
        return None
    found = list(_parts(model, "", blocks, _Shared(model)))
    return Parts(tuple(n for n, is_part in found if is_part), frozenset(n for n, is_part in found if not is_part))


class _Shared:
    """Which modules and parameters of a model occur in several places."""

    def __init__(self, model: nn.Module) -> None:
        modules = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
        self._modules = {key for key, number in modules.items() if number > 1}
        holders = Counter(id(p) for part in model.modules() for p in part._parameters.values() if p is not None)
        self._parameters = {key for key, number in holders.items() if number > 1}

    def has(self, module: nn.Module) -> bool:
        own = [parameter for parameter in module.parameters() if id(parameter) not in self._parameters]
        return not own or id(module) in self._modules


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of modules of one class with parameters."""
    members = list(module.children())
    if isinstance(module, _LISTS) and len(members) > 1 and len({type(each) for each in members}) == 1:
        if next(module.parameters(), None) is not None:
            yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _lists(child, f"{name}.{key}" if name else key)


def _parts(module: nn.Module, name: str, blocks: set[str], shared: _Shared) -> Iterator[tuple[str, bool]]:
    """Names of modules, and whether each is a part; others are everywhere."""
    if name in blocks:
        yield f"{name}.*", True
        return
    prefix = f"{name}." if name else ""
    if not any(each.startswith(prefix) for each in blocks) and type(module).forward is not nn.Module.forward:
        if next(module.parameters(), None) is not None:
            yield name, not shared.has(module)
        return
    for key, child, is_named in _in_order(module):
        inside = _parts(child, prefix + key, blocks, shared)
        # What the forward does not name is used in another way, such as a table that is read as a whole.
        yield from inside if is_named else ((each, is_part and "*" in each) for each, is_part in inside)


def _in_order(module: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """The modules inside a container in the order in which its forward names them, and whether it does."""
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return [(key, child, True) for key, child in children]
    names: list[str] = []
    try:
        _collect_named(module, type(module).forward, names, set())
    except (OSError, TypeError):
        return [(key, child, True) for key, child in children]
    found, place = [], 0
    for key, child in children:
        place = names.index(key) if key in names else place
        found.append((place, key, child, key in names))
    return [(key, child, is_named) for _, key, child, is_named in sorted(found, key=lambda item: item[0])]


def _collect_named(module: nn.Module, function: Callable[..., Any], names: list[str], seen: set[str]) -> None:
    """Add the modules inside that a method uses, in the order of its source, and those of methods that it calls."""
    for name in _USE.findall(inspect.getsource(inspect.unwrap(function))):
        if name in seen:
            continue
        seen.add(name)
        method = getattr(type(module), name, None)
        if name in module._modules:
            names.append(name)
        elif inspect.isfunction(method) and method.__module__ != "transformers.modeling_utils":
            _collect_named(module, method, names, seen)
