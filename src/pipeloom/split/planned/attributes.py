"""Attributes of the modules that stages copy: copies take what is set on the model, and keep what a forward sets."""

import copy
import weakref
from types import MethodType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeloom.split.attribute_contents import OF_TORCH, contents_of, same
from pipeloom.split.planned.origins import EARLIER, LATER, Origins

_ABSENT = object()
_FIXED = OF_TORCH | {"forward"}  # a stage runs the forward that was there when it was made


class AttributeLink:
    """A module of the model, and the copy of it in a stage.

    The copy takes an attribute when it is set on the module. Until then it keeps what a forward sets.

    Args:
        module: of the model; it may be freed.
        twin: has its attributes as they are now.
    """

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        self._module, self.twin = weakref.ref(module), twin
        self._taken = {name: value for name, value in vars(module).items() if name not in _FIXED}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        link = object.__new__(type(self))
        link._module, link.twin, link._taken = self._module, copy.deepcopy(self.twin, memo), dict(self._taken)
        return link

    def update(self) -> bool:
        """Take the attributes that were set or deleted on the module since the last call; whether there are any."""
        module = self._module()
        if module is None:
            return False
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
        return changed


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
        return True in [link.update() for link in self._links]

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
