"""Where the values in a stage's forward come from: `Origins` follows them through the operations between its parts.

A stage runs its model's forward with zeros for what other stages compute. The first forward of each form of inputs is
watched: it finds the values, beside the result of the stage's last part, that later stages need, and makes sure that
no zeros reach the stage's own parts. Results of operations have the origins of their operands, unless only shapes
matter.

A value that combines results of modules on several stages, such as the logits of two towers, is computed on the stage
that reads it. The results get there: each has an origin of its own, so a stage knows which of its results are read
together with those of later stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipeloom.split.planned.tracking.decisions import ANY, TO_PYTHON, decision_of

OWN = 1  # computed by a part of this stage, or received
LAST = 2  # the result of the last part of this stage
LATER = 4  # zeros for what a later stage computes
EARLIER = 8  # zeros for what an earlier stage computed
DRAWN = 16  # at random, alike on all stages
IN_UNIT = 32  # just drawn, from 0 up to 1
_GIVEN = 64  # it follows from values of the inputs, which differ between micro-batches
_FIRST_RESULT = 128  # the result of one module, and so on

GRADIENT = "torch.autograd.grad"

_OF_SHAPES = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    )
)
_READS_NO_ELEMENTS = frozenset(("__get__", "size", "dim", "numel", "stride", "untyped_storage", "is_inference"))
_OF_FIRST = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
_NESTED = (tuple, list, MutableMapping)
_CONSTANTS = frozenset((NoneType, bool, int, float, str))
_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"))
_COMPARISONS = frozenset(("lt", "__lt__", "ge", "__ge__"))


class Origins(TorchFunctionMode):
    """Follows the origins of tensors through torch's functions.

    Attributes:
        quiet: whether functions are not followed: inside of parts.
        decided: origins of the values that the forward has read into Python, such as for a branch.
        differentiates: whether it has called torch.autograd.grad.
        whole_graphs: the modules from whose results on all is computed on this stage; None: all is.
        decisions: what it has read; `ANY` of values that parts compute, or that all inputs of this form have alike.
        given_decisions: how many of these follow from values of its inputs alone.
        on_change: called with a tensor that a function has changed in place.
        on_hook: called with a tensor that gets a hook.
        watches: called with the arguments of each function that reads elements; None: nothing is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quiet = False
        self.decided = 0
        self.decisions: list[Any] = []
        self.given_decisions = 0
        self.differentiates = False
        self.whole_graphs: frozenset[str] | None = frozenset()
        self.on_change: Callable[[Tensor], None] = lambda tensor: None
        self.on_hook: Callable[[Tensor], None] = lambda tensor: None
        self.watches: Callable[[Any], None] | None = None
        self._of: dict[int, tuple[Tensor, int]] = {}  # tensors are kept, so that no other gets their id
        self._results: dict[str, tuple[Any, int]] = {}
        self._absent: dict[str, int] = {}

    def mark(self, value: Any, origin: int) -> None:
        """Add an origin to all tensors of a value."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._of[id(leaf)] = (leaf, origin | self._all_of_tensor(leaf))

    def mark_given(self, value: Any) -> None:
        """Note that the tensors of a value differ between micro-batches."""
        self.mark(value, _GIVEN)

    def _mark_computed(self, value: Any, origin: int) -> None:
        """As `mark`; what an operation has computed, also in place, may be beyond 1."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._of[id(leaf)] = (leaf, (origin | self._all_of_tensor(leaf)) & ~IN_UNIT)

    def replace(self, value: Any, origin: int) -> None:
        """Set the origin of all tensors of a value."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._of[id(leaf)] = (leaf, origin)

    def add_result(self, name: str, result: Any, given: Any) -> None:
        """Give the result of a module an origin of its own; the forward goes on with `given`, the same value."""
        self._results[name] = (result, bit := self._next_bit())
        self.mark(given, bit)

    def mark_absent(self, name: str, zeros: Any) -> None:
        """Note what zeros are for, where no stage sends it: a weight of a later layer, or `GRADIENT`."""
        if name not in self._absent:
            self._absent[name] = self._next_bit()
        self.mark(zeros, EARLIER | self._absent[name])

    def absent_in(self, origin: int) -> list[str]:
        """What no stage sends, of what a value with this origin combines."""
        return [name for name, bit in self._absent.items() if origin & bit]

    def _next_bit(self) -> int:
        return _FIRST_RESULT << (len(self._results) + len(self._absent))

    def has_result(self, name: str) -> bool:
        """Whether the module has run: of several calls, the first one has an origin of its own."""
        return name in self._results

    def results_in(self, origin: int) -> dict[str, Any]:
        """The results that a value with this origin combines, by module."""
        return {name: result for name, (result, bit) in self._results.items() if origin & bit}

    def of_tensor(self, tensor: Tensor) -> int:
        """The origins of a tensor; 0: it follows from inputs alone."""
        return self._all_of_tensor(tensor) & ~_GIVEN

    def of(self, value: Any) -> int:
        """The origins of all tensors of a value, also of those that objects in it have as attributes."""
        attributes = [vars(leaf) for leaf in tree_leaves(value) if _is_object(leaf)]
        return self._all_of((value, attributes)) & ~_GIVEN

    def _all_of_tensor(self, tensor: Tensor) -> int:
        found = self._of.get(id(tensor))
        return 0 if found is None else found[1]

    def _all_of(self, value: Any) -> int:
        origins = 0
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                origins |= self._all_of_tensor(leaf)
        return origins

    def argument_of_earlier(self, args: tuple[Any, ...], settings: Mapping[str, Any]) -> tuple[str, int] | None:
        """The name and the origins of an argument that follows from zeros; None: there is none."""
        found = [(where, self.of_tensor(tensor)) for where, tensor in tensors_of(args, settings)]
        others = [*((str(index), value) for index, value in enumerate(args)), *settings.items()]
        found += [(where, self.of(value)) for where, value in others if not isinstance(value, Tensor)]
        return next((each for each in found if each[1] & EARLIER), None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        if func is torch.autograd.grad and not self.quiet and (zeros := self._gradients(*args[:2])) is not None:
            return zeros
        name = getattr(func, "__name__", "")
        if self.watches is not None and not self.quiet and name not in _OF_SHAPES and name not in _READS_NO_ELEMENTS:
            self.watches((args, settings))
        result = func(*args, **settings)
        if self.quiet:
            return result
        if args and isinstance(args[0], Tensor):
            if _changes_first(name):
                self.on_change(args[0])
            elif name == "register_hook":
                self.on_hook(args[0])
        if name in _OF_SHAPES:
            return result
        origins = self._all_of(args[:1] if name in _OF_FIRST else (args, settings))
        if (found := decision_of(name, args, settings, result)) is not None:
            self.decisions.append(found if origins == _GIVEN else ANY)
            self.given_decisions += origins == _GIVEN
        if name in TO_PYTHON:
            self.decided |= origins & ~_GIVEN
        elif origins == DRAWN | IN_UNIT and name in _COMPARISONS and len(args) > 1 and _is_certain(args[1]):
            return result
        elif origins:
            self._mark_computed(result, origins)
            if _changes_first(name):
                self._mark_computed(args[:1], origins)
        return result

    def _gradients(self, outputs: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Zeros for the gradients of `outputs` for `inputs`; None: all of the graph between them is on this stage."""
        self.differentiates = True
        of_outputs, origins = self.of(outputs), self._all_of((outputs, inputs))
        if not origins & (LATER | EARLIER) and (of_outputs == 0 or all(self._is_whole(each) for each in inputs)):
            return None
        zeros = tuple(torch.zeros_like(each) for each in inputs)
        if origins & LATER and not origins & EARLIER:
            self.mark(zeros, origins)
        else:
            self.mark_absent(GRADIENT, zeros)
        return zeros

    def _is_whole(self, value: Any) -> bool:
        whole = self.whole_graphs
        return whole is None or not whole.isdisjoint(self.results_in(self._all_of(value)))


def _changes_first(name: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_object(leaf: Any) -> bool:
    """Whether a value may have tensors as attributes, such as a dataclass."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type) and not callable(leaf)


def _is_certain(bound: Any) -> bool:
    """Whether all numbers from 0 up to 1 are below it, or none: layers are often dropped with a probability of 0."""
    return isinstance(bound, int | float) and not 0 < bound < 1


def tensors_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, with their places: "0", "name", "name/1", "name/key".

    Also those inside of tuples, lists and dicts.
    """
    yield from _walk("", ((str(index), value) for index, value in enumerate(args)))
    yield from _walk("", settings.items())


def _walk(prefix: str, items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in items:
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif type(value) not in _CONSTANTS and isinstance(value, _NESTED):
            yield from _walk(f"{prefix}{name}/", ((str(key), each) for key, each in _items(value)))


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, MutableMapping) else enumerate(value))


def versions_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    """The tensors of `tensors_of` with the numbers of changes in place that they have seen; none in inference mode.

    Subclasses are left out: one notices what is asked of it (`NoticedNumber`).
    """
    found = tensors_of(args, settings)
    return [
        (place, tensor, tensor._version)
        for place, tensor in found
        if type(tensor) is Tensor and not tensor.is_inference()
    ]


def with_tensors(
    args: tuple[Any, ...], settings: Mapping[str, Any], found: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other tensors at some places of `tensors_of`: lists and dicts get them in place."""

    def fill(place: str, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [fill(f"{place}/{index}", each) for index, each in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) not in _CONSTANTS and isinstance(value, _NESTED):
            container: Any = value
            for key, each in _items(container):
                if (filled := fill(f"{place}/{key}", each)) is not each:
                    container[key] = filled
        return found.get(place, value)

    filled = tuple(fill(str(index), value) for index, value in enumerate(args))
    return filled, {name: fill(name, value) for name, value in settings.items()}
