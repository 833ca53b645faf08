"""Files of tokens: made once, mapped into memory afterwards.

One process at a time makes them, and others wait for it. A file gets its name when it is complete, so one that a killed
process was writing is made again, and all others stay.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.atomic_file import UNFINISHED, whole_file, write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.errors import DataError

Form = Mapping[str, Any]
"""The keys of the JSON that describes a file of tokens, "num_tokens" among them, with their types or forms."""

_PATIENCE_SECONDS = 5.0  # before a process tells that it waits


def cached_tokens(
    directory: Path, key: str, dtype: np.dtype[Any], form: Form, write: Callable[[BinaryIO], dict[str, Any]]
) -> tuple[NDArray[Any], dict[str, Any]]:
    """The numbers of a file, memory-mapped, and the JSON that describes them.

    Args:
        directory: of the files; made if missing.
        key: identifies the content.
        dtype: of the numbers.
        form: the keys of the JSON.
        write: writes the numbers if the file is missing, and returns the JSON with their number as "num_tokens".

    Raises:
        DataError: the directory cannot be read or written.
    """
    with told(directory):
        if read_about(directory, key, dtype, form) is None:
            with only_writer(directory):
                if read_about(directory, key, dtype, form) is None:
                    write_tokens(directory, key, write)
    return open_tokens(directory, key, dtype, form)


def open_tokens(directory: Path, key: str, dtype: np.dtype[Any], form: Form) -> tuple[NDArray[Any], dict[str, Any]]:
    """The numbers of a file that exists, and the JSON that describes them. Raises DataError."""
    facts = read_about(directory, key, dtype, form)
    if facts is None:
        raise DataError(f"the token cache {directory} has changed while it was read. Start the run again.")
    if not facts["num_tokens"]:  # an empty file cannot be mapped
        return np.empty(0, dtype), facts
    with told(directory):
        return np.asarray(np.memmap(_files(directory, key)[0], dtype, "r", shape=(facts["num_tokens"],))), facts


def write_tokens(directory: Path, key: str, write: Callable[[BinaryIO], dict[str, Any]]) -> dict[str, Any]:
    """Write a file of tokens and the JSON that describes them; `write` as in `cached_tokens`. Raises OSError."""
    stream, about = _files(directory, key)
    with whole_file(stream) as out:
        facts = write(out)
    write_whole(about, json.dumps(facts))
    return facts


def read_about(directory: Path, key: str, dtype: np.dtype[Any], form: Form) -> dict[str, Any] | None:
    """The JSON that describes a file of tokens, or None if it or the file is missing, incomplete or damaged."""
    stream, about = _files(directory, key)
    try:
        facts = parse_json(about.read_bytes())
        size = stream.stat().st_size
    except (OSError, ValueError):
        return None
    return facts if _fits(facts, form) and size == facts["num_tokens"] * dtype.itemsize else None


def _fits(value: Any, form: Form | type) -> bool:
    """Whether JSON has the keys of a form, with values of their types; numbers are at least 0."""
    if isinstance(form, Mapping):
        return isinstance(value, dict) and all(key in value and _fits(value[key], kind) for key, kind in form.items())
    return type(value) is form if type(value) is not int else form is int and value >= 0


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Wait until no other process writes to a directory, which is made if missing, and lock it.

    The kernel releases the lock with the process. What a killed process left behind is removed.

    Raises:
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems do not support locks on directories
            _lock(descriptor, directory)
        for file in directory.glob(UNFINISHED):
            file.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def told(directory: Path) -> Iterator[None]:
    """Raises DataError in place of an OSError about the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {error.filename or directory} cannot be read or written ({error.strerror}). "
            "Free disk space, or set data.cache to a writable directory."
        ) from None


def fits_fraction(number: int, fraction: float, total: int) -> bool:
    """Whether a choice by hash came near the fraction that it was meant to choose."""
    return fraction * total / 4 <= number <= min(4 * fraction, (1 + fraction) / 2) * total


def _lock(descriptor: int, directory: Path) -> None:
    limit = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < limit:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)
    print(f"waiting for another process that writes tokens to {directory}", flush=True)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _files(directory: Path, key: str) -> tuple[Path, Path]:
    return directory / f"corpus-{key}.bin", directory / f"corpus-{key}.json"
