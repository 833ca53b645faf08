"""Attributes and buffers of the modules that stages copy: what is set on the model, and what a forward sets."""

import copy
import weakref
from collections.abc import Iterable
from itertools import compress
from operator import is_
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeloom.split.attribute_contents import OF_TORCH, contents_of, same
from pipeloom.split.planned.collected import INSTALLED
from pipeloom.split.planned.place import StagePlace
from pipeloom.split.planned.tracking.origins import EARLIER, LATER, Origins

_ABSENT = object()
_FIXED = OF_TORCH | {"forward", INSTALLED}  # a stage runs the forward that was there when it was made


class AttributeLink:
    """A module of the model, and the copy of it in a stage.

    The copy takes an attribute when it is set on the module. Until then it keeps what a forward sets.

    Args:
        module: of the model; it may be freed.
        twin: has its attributes as they are now.

    Attributes:
        module: of the model; returns None once it is freed.
        twin: the copy.
        seen: attributes of the module at the last look: their number, the name of the last one, which of them may be
            taken, and the values of these.
    """

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        self.module, self.twin = weakref.ref(module), twin
        self._taken = {name: value for name, value in vars(module).items() if name not in _FIXED}
        self.seen = _look(vars(module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        link = object.__new__(type(self))
        link.module, link.twin = self.module, copy.deepcopy(self.twin, memo)
        link._taken, link.seen = dict(self._taken), self.seen
        return link

    def update(self, module: nn.Module) -> bool:
        """Take the attributes that were set or deleted on the module since the last call; whether there are any."""
        changed = False
        now, taken, own = vars(module), self._taken, vars(self.twin)
        for name, value in now.items():
            if taken.get(name, _ABSENT) is not value and name not in _FIXED:
                taken[name], changed = value, True
                own[name] = bound_to(self.twin, value, module)
        for name in [name for name in taken if name not in now]:
            del taken[name]
            own.pop(name, None)
            changed = True
        self.seen = _look(now)
        return changed


def _look(attributes: dict[str, Any]) -> tuple[int, str, list[bool], list[Any]]:
    is_free = [name not in _FIXED for name in attributes]
    return len(is_free), next(reversed(attributes)), is_free, list(compress(attributes.values(), is_free))


def bound_to(twin: nn.Module, value: Any, module: nn.Module) -> Any:
    """The value of an attribute; a method of `module`, such as a replaced forward, as one of `twin`."""
    return MethodType(value.__func__, twin) if isinstance(value, MethodType) and value.__self__ is module else value


class ContainerAttributes:
    """The attributes of the modules that a stage copied from the model."""

    def __init__(self) -> None:
        self._links: list[AttributeLink] = []
        self._before: list[dict[str, Any]] = []
        self._kept: list[Tensor] = []  # tensors that follow from zeros, left by the last forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        attributes = type(self)()
        attributes._links = copy.deepcopy(self._links, memo)
        return attributes

    def follow(self, module: nn.Module, twin: nn.Module) -> None:
        """Let a copy take the attributes that are set on a module."""
        self._links.append(AttributeLink(module, twin))

    def update(self) -> bool:
        """Take the attributes that were set on the model's modules since the last call; whether there are any."""
        changed = False
        for link in self._links:
            module = link.module()
            if module is None:
                continue
            number, last, is_free, values = link.seen
            now = vars(module)
            # In almost all forwards nothing was set. A look at the values, in their order, finds that out soonest.
            if (
                len(now) != number
                or next(reversed(now)) != last
                or not all(map(is_, compress(now.values(), is_free), values))
            ):
                changed = link.update(module) or changed
        return changed

    def begin(self, origins: Origins | None) -> None:
        """Note the attributes before a forward that is watched."""
        if origins is not None:
            origins.mark(self._kept, EARLIER)
            self._before = self._contents()

    def unchanged(self, origins: Origins) -> bool:
        """Whether a watched forward left the attributes as they were. Where it did not, the next one may differ."""
        found = [value for link in self._links for name, value in vars(link.twin).items() if name not in OF_TORCH]
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._kept = [tensor for tensor in tensors if origins.of_tensor(tensor) & (EARLIER | LATER)]
        pairs = zip(self._contents(), self._before, strict=True)
        return all(now.keys() == old.keys() and all(same(now[name], old[name]) for name in now) for now, old in pairs)

    def _contents(self) -> list[dict[str, Any]]:
        return [contents_of(vars(link.twin)) for link in self._links]


class SharedAttributes:
    """Dicts and lists that a part of a stage has as attributes, and modules outside of the stage as well.

    Args:
        model: the whole model.
        place: of the stage in it.
    """

    def __init__(self, model: nn.Module, place: StagePlace) -> None:
        homes: dict[int, set[str]] = {}  # by object: the parts with it; others are told apart by their own names
        found: dict[int, Any] = {}
        for name, module in model.named_modules():
            part = next((name[:end] for end in _ends(name) if name[:end] in place.places), f"{name} (no part)")
            for key, value in vars(module).items():
                if key not in OF_TORCH and key != INSTALLED and isinstance(value, (dict, list)):
                    homes.setdefault(id(value), set()).add(part)
                    found[id(value)] = value
        self._of: dict[str, list[Any]] = {}
        own = set(place.names)
        for key, parts in homes.items():
            if not parts <= own and place.elsewhere:
                for part in parts & own:
                    self._of.setdefault(part, []).append(found[key])

    def tensors(self, part: str) -> list[Tensor]:
        """The tensors in these dicts and lists."""
        return [leaf for leaf in tree_leaves(self._of.get(part, ())) if isinstance(leaf, Tensor)]


def _ends(name: str) -> Iterable[int]:
    """Where a module's name and those of the modules around it end."""
    return [*(index for index, letter in enumerate(name) if letter == "."), len(name)]


class KeptBuffers:
    """The values of buffers, to be restored where they change.

    Args:
        homes: of each module its dict of buffers.
    """

    def __init__(self, homes: Iterable[dict[str, Any]]) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor, int]] = []
        for home in homes:
            self._kept.append((home, dict(home)))
            tensors = (tensor for tensor in home.values() if tensor is not None and not tensor.is_meta)
            self._values += [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]

    def restore(self) -> None:
        """Give the modules their buffers back, with the values that they had."""
        for home, kept in self._kept:
            home.update(kept)
        with torch.no_grad():
            for tensor, value, version in self._values:
                if tensor._version != version:
                    tensor.copy_(value)
