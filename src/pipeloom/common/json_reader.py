"""Reads files that people write, mostly JSON, and reports the first wrong entry in one line with its path."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from pipeloom.errors import InputError, folded

_MOST_DIGITS = 300  # below the largest float, 1.8e308; a longer integer becomes infinite, as 1e999 does
Word = TypeVar("Word", bound=StrEnum)
T = TypeVar("T")


def parse_file(
    name: str, path: str | Path, read: Callable[[str], T], kind: str = "JSON file", error: type[InputError] = InputError
) -> T:
    """Parse the file `path`; a leading byte order mark is dropped.

    Args:
        name: the option or the thing that names the file, for error messages.
        path: the file.
        read: parses its text; raises InputError.
        kind: the kind of the file, for error messages.
        error: the error class to raise.

    Raises:
        InputError: the file cannot be read or parsed; the message begins with `name` and the path.
    """
    try:
        return read(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "not a text file"
        raise error(f"{name} {path}: {reason}. Name a readable {kind}.") from cause
    except InputError as cause:
        raise error(f"{name} {path}: {cause}") from cause


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """Parse JSON as json.loads does, from files that may be damaged or written by others.

    Raises:
        ValueError: the text is not valid JSON, or is nested too deep.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def load_json(text: str) -> Any:
    """Parse JSON. Integers beyond the range of a float become infinite.

    Raises:
        ValueError: the text is not valid JSON, has a duplicate key in one object, or is nested too deep.
    """
    return parse_json(text, object_pairs_hook=_object, parse_int=_integer)


class Entry(NamedTuple):
    """A value in a JSON document. Each method returns the value as the type of its name, or raises `error`.

    Attributes:
        value: the parsed value.
        source: the document in error messages, such as ``the costs file``.
        path: the place in the document, such as ``stages[2].forward``; empty for the root.
        error: the error class.
    """

    value: Any
    source: str
    path: str = ""
    error: type[InputError] = InputError

    @property
    def place(self) -> str:
        """The document and the path in it, for error messages."""
        return f"{self.source}: {self.path}" if self.path else self.source

    def refuse(self, rule: str, fix: str = "") -> NoReturn:
        """Raise the error that this value breaks `rule`."""
        is_value = "=" if self.path else " is "
        raise self.error(f"{self.place}{is_value}{folded(self.value)}: {rule}.{fix and f' {fix}.'}")

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Self]:
        """The entries of an object that has all `required` keys, and no others but `optional` ones."""
        known = (*required, *optional)
        keys = f"keys {', '.join(dict.fromkeys(known))}"
        if not isinstance(self.value, Mapping):
            self.refuse(f"must be an object with {keys}")
        if missing := [key for key in required if key not in self.value]:
            them = ("key", "it") if len(missing) == 1 else ("keys", "them")
            raise self.error(
                f"{self.place}: missing {them[0]} {', '.join(map(repr, missing))}. Add {them[1]} ({keys})."
            )
        for key in self.value:
            if key not in known:
                raise self.error(f"{self.place}: unknown key {folded(key)}. Remove it ({keys}).")
        prefix = f"{self.path}." if self.path else ""
        return {key: type(self)(value, self.source, prefix + key, self.error) for key, value in self.value.items()}

    def members(self, *, length: int | None = None) -> list[Self]:
        """The entries of a list, which has `length` of them if that is given."""
        if not isinstance(self.value, list):
            self.refuse("must be a list")
        if length is not None and len(self.value) != length:
            self.refuse(f"must be a list of length {length}")
        return [type(self)(value, self.source, f"{self.path}[{n}]", self.error) for n, value in enumerate(self.value)]

    def _is_finite(self) -> bool:
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return number and abs(self.value) <= sys.float_info.max

    def number(self, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
        """A finite number from `least` to `most`; `above` excludes `least` itself."""
        value = self.value
        if not self._is_finite() or not least <= value <= most or (above and value == least):
            low = "" if least == -math.inf else f" {'>' if above else '>='} {least:g}"
            high = "" if most == math.inf else f"{' and' if low else ''} <= {most:g}"
            self.refuse(f"must be a finite number{low}{high}")
        return float(value)

    def whole(self, *, least: int = 0) -> int:
        """An integer from `least`; a float without a fraction, such as 8.0, counts."""
        value = self.value
        if not self._is_finite() or value != int(value) or value < least:
            self.refuse(f"must be an integer >= {least}")
        return int(value)

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            self.refuse("must be a string")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("must be true or false")
        return self.value

    def word(self, kind: type[Word]) -> Word:
        """A member of an enum, by its value."""
        if self.value not in list(kind):
            self.refuse(f"must be one of {', '.join(kind)}")
        return kind(self.value)


def read_json(text: str, source: str, form: str, error: type[InputError] = InputError) -> Entry:
    """Parse JSON and return its root entry.

    Args:
        text: the content of a file.
        source: the name of the file's content in error messages, such as ``the profile``.
        form: the expected content, for error messages.
        error: the error class that the returned entry raises.

    Raises:
        InputError: the text is not valid JSON.
    """
    try:
        return Entry(load_json(text), source, error=error)
    except (TypeError, ValueError) as cause:
        raise error(f"{source} is not valid JSON ({cause}). Expected {form}.") from cause


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"duplicate key {key!r} in one object")
        made[key] = value
    return made


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)
