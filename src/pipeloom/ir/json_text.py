"""JSON that people write: what the reader of the standard library lets pass, or fails at, is refused alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MOST_DIGITS = 300  # a float holds 308; more digits of a whole number are an infinity, as 1e999 is


def load_json(text: str) -> Any:
    """The value of a JSON text. Whole numbers beyond every float are infinite.

    Raises:
        ValueError: it is no JSON, has a key twice in one object, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} stands twice in one object")
        made[key] = value
    return made


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)
