"""JSON that people write: read key by key; what is not as it should be is refused in one line that names it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, TypeVar

from pipeloom.errors import InputError, folded

_MOST_DIGITS = 300  # a float holds 308; more digits of a whole number are an infinity, as 1e999 is
Word = TypeVar("Word", bound=StrEnum)


def load_json(text: str) -> Any:
    """The value of a JSON text. Whole numbers beyond every float are infinite.

    Raises:
        ValueError: it is no JSON, has a key twice in one object, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_json(text: str, what: str, form: str, error: type[InputError] = InputError) -> Entry:
    """The value of a JSON text, to be asked for what it should be.

    Args:
        text: of a file.
        what: it is, for messages, such as ``the profile``.
        form: that it should have.
        error: what refusals raise.

    Raises:
        InputError: it is no JSON.
    """
    try:
        return Entry(load_json(text), what, error)
    except (TypeError, ValueError) as cause:
        raise error(f"{what} is no JSON ({cause}): write {form}") from cause


class Entry(NamedTuple):
    """A value in a JSON text. Every method returns it as what it should be, or raises `error`.

    Attributes:
        value: as the parser has it.
        what: it is, for messages, such as ``forward of stage 2 of the costs file``.
        error: the kind of error.
    """

    value: Any
    what: str
    error: type[InputError] = InputError

    def refuse(self, rule: str, fix: str = "correct it") -> NoReturn:
        """Raise the error: this value breaks `rule`."""
        raise self.error(f"{self.what} is {folded(self.value)}: {rule}; {fix}")

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Entry]:
        """An object with all of the `required` keys, and no others but the `optional` ones."""
        known = (*required, *optional)
        if not isinstance(self.value, Mapping):
            raise self.error(f"{self.what} is no object: its keys are {', '.join(known)}; write them")
        for key in required:
            if key not in self.value:
                raise self.error(f"{self.what} lacks the key {key!r}: its keys are {', '.join(known)}; add it")
        for key in self.value:
            if key not in known:
                raise self.error(f"{self.what} has a key {folded(key)}: its keys are {', '.join(known)}; drop it")
        return {key: Entry(value, f"{key} of {self.what}", self.error) for key, value in self.value.items()}

    def members(self, name: str, owner: str | None = None, *, length: int | None = None) -> list[Entry]:
        """A list, each member of which is called `name` and its number, of the `owner` (the list itself)."""
        if not isinstance(self.value, list):
            self.refuse("it is a list", "put it into brackets")
        if length is not None and len(self.value) != length:
            self.refuse(f"it is a list of {length}")
        owner = owner or self.what
        return [Entry(value, f"{name} {n} of {owner}", self.error) for n, value in enumerate(self.value)]

    def _is_finite(self) -> bool:
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return number and abs(self.value) <= sys.float_info.max

    def number(self, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
        """A finite number from `least` to `most`; `above` leaves `least` itself out."""
        value = self.value
        if not self._is_finite() or not least <= value <= most or (above and value == least):
            low = "" if least == -math.inf else f" above {least:g}" if above else f", {least:g} or more"
            self.refuse(f"it is a finite number{low}{'' if most == math.inf else f', at most {most:g}'}")
        return float(value)

    def whole(self, *, least: int = 0) -> int:
        """A whole number from `least`; 8.0 is one."""
        value = self.value
        if not self._is_finite() or value != int(value) or value < least:
            self.refuse(f"it is a whole number, {least} or more")
        return int(value)

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            self.refuse("it is text", "write it in quotes")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("it is true or false")
        return self.value

    def word(self, kind: type[Word]) -> Word:
        """A member of an enum."""
        if self.value not in list(kind):
            self.refuse(f"it is one of {', '.join(kind)}", "choose one")
        return kind(self.value)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} stands twice in one object")
        made[key] = value
    return made


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)
