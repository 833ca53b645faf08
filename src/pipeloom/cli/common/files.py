"""Read and write the files that options name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeloom.common.atomic_file import write_whole
from pipeloom.errors import InputError

T = TypeVar("T")


def read_json(option: str, path: str, parse: Callable[[str], T]) -> T:
    """Parse the file that `option` names; a leading byte order mark is dropped.

    Raises:
        InputError: the file cannot be read or parsed; the message begins with the option and the file.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"{option} {path}: {reason}. Name a readable JSON file.") from error
    except InputError as error:
        raise InputError(f"{option} {path}: {error}") from error


def write_text(option: str, path: str, text: str) -> None:
    """Write the file that `option` names, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}. Name a file that can be written.") from error
