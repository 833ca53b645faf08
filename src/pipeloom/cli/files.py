"""Files that options name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeloom.common.atomic_file import write_whole
from pipeloom.errors import InputError

T = TypeVar("T")


def read_json(option: str, path: str, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the file that `option` names; a byte order mark in front, as Windows writes it, is dropped.

    Raises:
        InputError: it cannot be read, or `parse` refuses it; the message begins with the option and the file.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"{option} {path}: {reason}; name a readable JSON file") from error
    except InputError as error:
        raise InputError(f"{option} {path}: {error}") from error


def write_text(option: str, path: str, text: str) -> None:
    """Write the file that `option` names, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise InputError(
            f"{option} {path}: {error.strerror or error}: the file must be writable; name another path"
        ) from error
