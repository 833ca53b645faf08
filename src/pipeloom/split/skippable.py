"""Skip connections: a layer stashes a tensor under a name, and a later layer pops it.

    @skippable(stash=["x"])                     @skippable(pop=["x"])
    class First(nn.Module):                     class Last(nn.Module):
        def forward(self, input):                   def forward(self, input):
            yield stash("x", input)                     x = yield pop("x")
            return self.layer(input)                    return self.layer(input) + x

In an nn.Sequential, such layers run as they stand. In a `Pipe` and in a `Pipeline`, a value goes from the device that
stashes it to the device that pops it, once, and not through the devices between them (torchgpipe, arXiv:2004.09910,
section 3.2).
"""

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from pipeloom.errors import PipeTypeError, RunError, folded

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


@dataclass(frozen=True)
class Namespace:
    """Keeps skips of one name apart: ``layer.isolate(namespace)``. A copy is equal to its original."""

    identity: str = field(default_factory=lambda: uuid.uuid4().hex)


class SkipKey(NamedTuple):
    """What identifies a skip in a model: its namespace, if it has one, and its name."""

    namespace: Namespace | None
    name: str


class stash(NamedTuple):  # noqa: N801  # ``yield stash(...)`` reads as the command that it is
    """``yield stash(name, value)`` in the forward of a `skippable` module keeps a value for a later module.

    Attributes:
        name: one of the names that the module declares as ``stash``.
        value: a tensor, or None.
    """

    name: str
    value: Tensor | None = None


class pop(NamedTuple):  # noqa: N801
    """``value = yield pop(name)`` in the forward of a `skippable` module takes the value that an earlier one stashed.

    Attributes:
        name: one of the names that the module declares as ``pop``.
    """

    name: str


class _Thread(threading.local):
    def __init__(self) -> None:
        self.values: MutableMapping[SkipKey, Any] = {}


_thread = _Thread()


@contextmanager
def skip_values(values: MutableMapping[SkipKey, Any]) -> Iterator[None]:
    """Modules that run in this thread stash into `values` and pop from it."""
    before, _thread.values = _thread.values, values
    try:
        yield
    finally:
        _thread.values = before


class Skippable:
    """The methods that `skippable` adds to a module."""

    stashable_names: frozenset[str]
    poppable_names: frozenset[str]
    __dict__: dict[str, Any]

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Any:
        """Put the module's skips, or those named by `only`, into a namespace; returns the module."""
        names = self.stashable_names | self.poppable_names if only is None else only
        self.__dict__["_skip_namespaces"] = {**_namespaces(self), **dict.fromkeys(names, namespace)}
        return self

    def stashable(self) -> list[SkipKey]:
        """The skips that the module stashes."""
        return [SkipKey(_namespaces(self).get(name), name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[SkipKey]:
        """The skips that the module pops."""
        return [SkipKey(_namespaces(self).get(name), name) for name in sorted(self.poppable_names)]


def _namespaces(module: Any) -> dict[str, Namespace]:
    found: dict[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return found


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[ModuleClass], ModuleClass]:
    """Class decorator: the forward of the module is a generator that yields `stash` and `pop` commands.

    Names of parameters and entries of state_dict stay as they are. A module with skips runs outside of pipelines too.

    Args:
        stash: names of the values that each forward stashes.
        pop: names of the values that each forward pops; an earlier module stashed them.

    Raises:
        RunError: in a forward: an undeclared name, a declared one that was not used, or a value that was not stashed.
    """
    stashes, pops = frozenset(stash), frozenset(pop)

    def decorate(cls: ModuleClass) -> ModuleClass:
        forward, representation = cls.forward, cls.__repr__
        added = {
            "forward": _driven(forward, stashes, pops),
            "__repr__": lambda self: f"@skippable({representation(self)})",
            "stashable_names": stashes,
            "poppable_names": pops,
            "isolate": Skippable.isolate,
            "stashable": Skippable.stashable,
            "poppable": Skippable.poppable,
        }
        for name, value in added.items():
            setattr(cls, name, value)
        return cls

    return decorate


def _driven(forward: Callable[..., Any], stashes: frozenset[str], pops: frozenset[str]) -> Callable[..., Any]:
    """`forward`, whose commands are carried out."""

    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = {"stash": set(stashes), "pop": set(pops)}
        result = forward(self, *args, **kwargs)
        if isinstance(result, Generator):
            result = _drive(result, self, waiting)
        for kind, names in waiting.items():
            if names:
                raise RunError(
                    f"{type(self).__name__} declares {kind}={sorted(names)} and did not {kind} it in its forward. "
                    f"Yield {kind}(...) for each name, or do not declare it."
                )
        return result

    return run


def _drive(commands: Generator[Any, Any, Any], module: Any, waiting: dict[str, set[str]]) -> Any:
    """Run a forward to its end, with an answer to each of its commands."""
    answer = None
    while True:
        try:
            command = commands.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if not isinstance(command, stash | pop):
            raise PipeTypeError(f"{type(module).__name__} yields {folded(command)}: must be stash(...) or pop(...).")
        kind = type(command).__name__
        if command.name not in waiting[kind]:
            declared = module.stashable_names if kind == "stash" else module.poppable_names
            rule = "did so already" if command.name in declared else "did not declare it"
            raise RunError(
                f"{type(module).__name__}, {kind}({command.name!r}): the module {rule}. Declared: {sorted(declared)}."
            )
        waiting[kind].discard(command.name)
        key = SkipKey(_namespaces(module).get(command.name), command.name)
        if isinstance(command, stash):
            _thread.values[key] = command.value
        elif key in _thread.values:
            answer = _thread.values.pop(key)
        else:
            raise RunError(f"{type(module).__name__} pops {command.name!r}, which no earlier module stashed.")


def skips_of(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """What a layer stashes and pops, including the modules inside it."""
    modules = [module for module in layer.modules() if hasattr(module, "stashable_names")]
    stashed = [key for module in modules for key in module.stashable()]  # type: ignore[operator]
    popped = [key for module in modules for key in module.poppable()]  # type: ignore[operator]
    return stashed, popped


def pairing_error(layers: Iterable[tuple[str, nn.Module | None]]) -> str | None:
    """The error for skips of named layers that do not pair: each is stashed by one, and popped by one behind it."""
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    problems = []
    for name, layer in layers:
        if layer is None:
            continue
        stashes, pops = skips_of(layer)
        alone = len([part for part in layer.modules() if hasattr(part, "stashable_names")]) == 1
        both = set(stashes) & set(pops) if alone else set()
        problems += [f"{name!r} declared {key.name!r} both as stashable and as poppable" for key in sorted_keys(both)]
        for key in stashes:
            if key in stashed and key not in both:
                problems.append(f"{name!r} redeclared {key.name!r} as stashable but not isolated by namespace")
            stashed.add(key)
        for key in pops:
            if key in both:
                continue
            if key in popped:
                problems.append(f"{name!r} redeclared {key.name!r} as poppable but not isolated by namespace")
            elif key not in stashed:
                problems.append(f"{name!r} declared {key.name!r} as poppable but it was not stashed")
            popped.add(key)
        popped |= both
    problems += [f"no module declared {key.name!r} as poppable but stashed" for key in sorted_keys(stashed - popped)]
    if not problems:
        return None
    return f"stash and pop do not pair: {'; '.join(problems)}. Declare each skip once on each side."


def sorted_keys(keys: Iterable[SkipKey]) -> list[SkipKey]:
    """Keys in an order that is the same in every run."""
    return sorted(keys, key=lambda key: (key.name, "" if key.namespace is None else key.namespace.identity))
