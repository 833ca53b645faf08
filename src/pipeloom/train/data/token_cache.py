"""Files of tokens in the output directory: made once, mapped into memory afterwards.

Several ranks may make the same file at once. Each writes a temporary file and renames it, so the last one replaces the
others with the same content, and a file that is already mapped does not change.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.atomic_file import whole_file, write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.errors import DataError


def cached_tokens(
    directory: Path, key: str, dtype: np.dtype[Any], write: Callable[[BinaryIO], dict[str, Any]]
) -> tuple[NDArray[Any], dict[str, Any]]:
    """The numbers of a file, memory-mapped, and the JSON that describes them.

    Args:
        directory: of the files; made if missing.
        key: identifies the content.
        dtype: of the numbers.
        write: writes the numbers if the file is missing, and returns the JSON with their number as "num_tokens".

    Raises:
        DataError: the directory cannot be read or written.
    """
    stream, about = (directory / f"corpus-{key}{ending}" for ending in (".bin", ".json"))
    try:
        facts = _read_about(stream, about, dtype)
        if facts is None:
            directory.mkdir(parents=True, exist_ok=True)
            with whole_file(stream) as out:
                facts = write(out)
            write_whole(about, json.dumps(facts))
        return np.asarray(np.memmap(stream, dtype, "r", shape=(facts["num_tokens"],))), facts
    except OSError as error:
        raise DataError(
            f"the token cache {error.filename or directory} cannot be read or written ({error.strerror}). "
            "Free disk space, or set output_dir to a writable directory."
        ) from None


def facts_of(file: Path) -> list[Any]:
    """Path, size and modification time of `file`, which identify its content."""
    try:
        stat = file.stat()
    except OSError as error:
        raise unreadable(file, error) from None
    return [str(file), stat.st_size, stat.st_mtime_ns]


def unreadable(file: Path, error: OSError) -> DataError:
    """The error about a file of data."""
    return DataError(f"data file {file}: {error.strerror}. Make it readable, or leave it out.")


def fits_fraction(number: int, fraction: float, total: int) -> bool:
    """Whether a choice by hash came near the fraction that it was meant to choose."""
    return fraction * total / 4 <= number <= min(4 * fraction, (1 + fraction) / 2) * total


def _read_about(stream: Path, about: Path, dtype: np.dtype[Any]) -> dict[str, Any] | None:
    """The JSON that describes a file of tokens, or None if it is missing or incomplete."""
    try:
        facts: dict[str, Any] = parse_json(about.read_bytes())
        whole = stream.stat().st_size == facts["num_tokens"] * dtype.itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if whole else None
