"""`ModelArguments`: what a stage is given, as the keyword arguments of the model's forward."""

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError

FIRST = ""  # the key of the model's first argument, given without a name
_COUNT = "num_items_in_batch"  # differs from batch to batch, and is only divided by
_CONSTANTS = (bool, int, float, str, NoneType)


class ModelArguments:
    """The arguments of a model.

    Args:
        forward: of the model.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters
        self._names = frozenset(parameters)
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._in_order = [name for name, each in parameters.items() if each.kind in kinds]
        empty = inspect.Parameter.empty
        self._needed = [name for name in self._in_order if parameters[name].default is empty]
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def of(self, value: Any) -> dict[str, Any]:
        """The keyword arguments that a value is: a dict of these, several in order, or the first of them."""
        if isinstance(value, Tensor):  # asking for a Mapping takes longer
            return {FIRST: value}
        if isinstance(value, Mapping) and (self._takes_any or self._names.issuperset(value)):
            return dict(value)
        if _is_plain_sequence(value) and 1 < len(self._needed) <= len(value) <= len(self._in_order):
            return dict(zip(self._in_order, value, strict=False))
        return {FIRST: value}

    def check(self, value: Any, model: str) -> None:
        """Validate a value for the forward of a model with this name.

        Raises:
            InputError: an argument that the forward does not take or that is missing, or several values of which it is
                not clear whether they are one argument.
        """
        takes = f"the forward of {model}({', '.join(self._in_order)})"
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in self._names]
            if unknown and not self._takes_any and self._names & value.keys():
                raise InputError(f"the batch has {unknown[0]!r}, which {takes} does not take. Rename or remove it.")
            missing = [name for name in self._needed if name not in value]
            if missing and (not unknown or self._takes_any):
                raise InputError(f"the batch has no {missing[0]!r}, which {takes} needs. Add it to the batch.")
            return
        if {*self.of(value)} != {FIRST} or (len(self._in_order) == 1 and self._needed == [*self._in_order]):
            return
        seen = f"one {type(value).__name__}"
        if _is_plain_sequence(value):
            seen = f"a {type(value).__name__} of {counted(len(value), 'value')}"
        if len(self._needed) > 1:
            raise InputError(
                f"inputs are {seen}, and {takes} needs {len(self._needed)} values. Pass a dict of its "
                f"arguments, {{{', '.join(f'{name!r}: ...' for name in self._needed)}}}."
            )
        if _is_plain_sequence(value) and self._in_order:
            first = self._in_order[0]
            raise InputError(
                f"inputs are {seen}, which may be several arguments, or one: "
                f"{takes} needs one. Pass a dict of its arguments, such as {{{first!r}: ...}}."
            )


def _is_plain_sequence(value: Any) -> bool:
    """Whether it is a list or a tuple whose fields have no names."""
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


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
