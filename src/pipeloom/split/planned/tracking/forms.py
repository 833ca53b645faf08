"""Forms of what parts return: structure, shapes, dtypes and constants; stages send them to those that pass parts over.

A forward may read the shape of what an earlier stage's part returned, such as to interpolate to it. Only the stage that
ran the part knows it. Most parts return values in the form of what their stage sends, and of those nothing is said.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

ALIKE = ""  # in place of a form: that of the value that arrives
_CONSTANTS = (NoneType, bool, int, float, str)


def form_of_result(value: Any) -> Any:
    """The form of a value, to compare: objects in it are equal to all others."""
    leaves, structure = tree_flatten(value)
    return structure, [_of_leaf(leaf) for leaf in leaves]


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return (type(leaf), leaf) if type(leaf) in _CONSTANTS else None


def encoded(value: Any) -> str | None:
    """The form of a value as JSON, of which `zeros_of` makes zeros.

    None: it holds something other than dense tensors, constants, tuples, lists and dicts, all of their own class.
    """
    try:
        return json.dumps(_stripped(value), separators=(",", ":"))
    except TypeError:
        return None


def _stripped(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if kind is tuple or kind is list:
        return [kind.__name__, [_stripped(each) for each in value]]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return ["dict", [[key, _stripped(each)] for key, each in value.items()]]
    if kind in _CONSTANTS:
        return ["constant", value]
    raise TypeError


def zeros_of(form: str, device: torch.device | None) -> Any:
    """A value in an `encoded` form."""
    return _filled(json.loads(form), device)


def _filled(form: Any, device: torch.device | None) -> Any:
    kind, content, *shape = form
    if kind == "tensor":
        return torch.zeros(shape[0], dtype=getattr(torch, content), device=device)
    if kind == "dict":
        return {key: _filled(each, device) for key, each in content}
    if kind == "constant":
        return content
    items = [_filled(each, device) for each in content]
    return tuple(items) if kind == "tuple" else items


class ResultForms:
    """The forms of the results of parts that one forward of a stage knows.

    Args:
        message: of the previous stage; empty on the first.

    Attributes:
        arrived: of parts of earlier stages whose results are unlike the value that arrived; None: they cannot be sent.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._message = message
        self.arrived: Mapping[str, str | None] = _forms_in(message["forms"]) if "forms" in message else {}
        self._own: dict[str, tuple[Any, str | None]] = {}

    def add(self, name: str, result: Any) -> None:
        """Note what a part of the stage returned."""
        self._own[name] = form_of_result(result), encoded(result)

    @property
    def unlike(self) -> list[str]:
        """The parts of the stage whose results differ in form from that of the last one."""
        last = next(reversed(self._own.values()), None)
        return [name for name, form in self._own.items() if form != last]

    def text(self, earlier: Sequence[str], result: Any) -> str:
        """The forms of the results of `earlier` parts and those of the stage that are unlike `result`, its last one.

        Returns:
            Each form once, and the parts with it, as JSON; empty: there are none.
        """
        forms = {name: self._own[name][1] for name in self.unlike}
        if "value" in self._message:
            value = self._message["value"]
            if form_of_result(value) == form_of_result(result):
                if not forms:
                    return str(self._message.get("forms", ""))
                forms = {**self.arrived, **forms}
            else:
                like, last = encoded(value), encoded(result)
                of_earlier = ((name, self.arrived.get(name, like)) for name in earlier)
                forms = {name: form for name, form in of_earlier if form is None or form != last} | forms
        if not forms:
            return ""
        numbers: dict[str | None, int] = {}
        names = {name: numbers.setdefault(form, len(numbers)) for name, form in forms.items()}
        return json.dumps([list(numbers), names], separators=(",", ":"))


@lru_cache(maxsize=1024)
def _forms_in(text: str) -> Mapping[str, str | None]:
    """The forms by part of `ResultForms.text`."""
    forms, names = json.loads(text)
    return {name: forms[index] for name, index in names.items()}
