"""`check_fields`: checks the fields of a dataclass against their type annotations."""

from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import EnumType
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeloom.errors import InputError, folded

_NAMES = {
    float: ("a number", "numbers"),
    int: ("an integer", "integers"),
    bool: ("True or False", "True or False"),
    str: ("a string", "strings"),
    NoneType: ("None", "None"),
}
_KINDS = {float: Real, int: Integral}  # which include numpy's scalars


def check_fields(made: Any, *, error: type[InputError] = InputError) -> None:
    """Check the fields of a dataclass against their annotations. Numbers and bools are distinct.

    Args:
        made: the instance; call this in its ``__post_init__``.
        error: the error class to raise.

    Raises:
        InputError: a field has the wrong type; the message has the first one's name, value and expected type.
    """
    for name, hint in _hints(made.__class__):
        fault = _fault(getattr(made, name), hint, name)
        if fault is not None:
            place, value, wanted = fault
            raise error(f"{type(made).__name__}.{place}={folded(value)}: must be {_named(wanted)}.")


@lru_cache(maxsize=256)
def _hints(kind: Hashable) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _choices(hint: Any) -> tuple[tuple[Any, Any, tuple[Any, ...]], ...]:
    """The alternatives of a type hint, each with its origin (``tuple``) and type arguments."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple((choice, get_origin(choice), get_args(choice)) for choice in choices)


def _fault(value: Any, hint: Any, place: str) -> tuple[str, Any, Any] | None:
    """The first mismatch as (place, value, type hint); None if the value matches."""
    found: tuple[str, Any, Any] | None = None  # in the first container of this kind
    for choice, kind, wanted in _choices(hint):
        if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, str):
            if isinstance(value, tuple) and kind is tuple and wanted[-1] is not ... and len(value) != len(wanted):
                fault: tuple[str, Any, Any] | None = (place, value, hint)
            elif not isinstance(value, Mapping) and _match_exactly(value, wanted):
                return None
            else:
                faults = (_fault(item, of, f"{place}[{key}]") for key, item, of in _members(value, wanted))
                fault = next((fault for fault in faults if fault is not None), None)
            if fault is None:
                return None
            found = found or fault
            continue
        is_bool = isinstance(value, bool) == (choice is bool)
        if choice is Any or (kind is None and isinstance(value, _KINDS.get(choice, choice)) and is_bool):
            return None
        if kind is Literal and value in wanted:
            return None
    return found or (place, value, hint)


def _match_exactly(value: Any, wanted: tuple[Any, ...]) -> bool:
    """Whether all members have exactly the declared types: a fast path for long containers."""
    if wanted[-1] is ... or len(wanted) == 1:
        return set(map(type, value)) <= {wanted[0]}
    return tuple(map(type, value)) == wanted


def _members(value: Any, wanted: tuple[Any, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """(key or index, member, type hint) of each member of a container."""
    if isinstance(value, Mapping):
        yield from ((key, item, wanted[1]) for key, item in value.items())
    elif isinstance(value, AbstractSet):
        yield from (("...", item, wanted[0]) for item in value)
    else:
        same = wanted[-1] is ... or len(wanted) == 1
        yield from ((number, item, wanted[0] if same else wanted[number]) for number, item in enumerate(value))


def _named(hint: Any, *, several: bool = False) -> str:
    """``a number, or a tuple of numbers``."""
    return ", or ".join(dict.fromkeys(_named_one(choice, several=several) for choice, *_ in _choices(hint)))


def _named_one(hint: Any, *, several: bool) -> str:
    if hint in _NAMES:
        return _NAMES[hint][several]
    kind, inside = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if kind is None:
        name = getattr(hint, "__name__", str(hint))
        if isinstance(hint, EnumType):
            return f"one of {', '.join(f'{name}.{member}' for member in hint.__members__)}"
        return f"{name}s" if several else f"an {name}" if name[0] in "AEIOU" else f"a {name}"
    container = {tuple: "tuple", frozenset: "frozenset"}.get(kind, kind.__name__.lower())
    if kind is tuple and inside[-1] is not ...:
        of = " and ".join(map(_named, inside))
    else:
        of = _named(inside[1] if issubclass(kind, Mapping) else inside[0], several=True)
    return f"{container}s of {of}" if several else f"a {container} of {of}"
