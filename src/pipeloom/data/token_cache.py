"""Files of tokens: made once, mapped into memory afterwards.

One process at a time makes them, and others wait for it. A file gets its name when it is complete, so one that a killed
process was writing is made again, and all others stay.

The JSON beside a file has a checksum per block of it. A process compares a block when it first reads it.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.atomic_file import UNFINISHED, whole_file, write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.errors import DataError

Form = Mapping[str, Any]
"""The keys of the JSON that describes a file of tokens, "num_tokens" among them, with their types or forms."""

BLOCK_BYTES = 1 << 16  # that have a checksum
_PATIENCE_SECONDS = 5.0  # before a process tells that it waits


class SummedFile:
    """A file that is written once, from its start to its end.

    Attributes:
        name: the path of the file.
        sums: CRC-32 of each block so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.name = file, file.name
        self._room = 0  # bytes that the last block still takes
        self.sums: list[int] = []

    def write(self, content: Any) -> int:
        """Write bytes, or numbers in memory."""
        rest = memoryview(content)
        rest = rest.cast("B") if rest.nbytes else memoryview(b"")
        while rest:
            if not self._room:
                self.sums.append(0)
                self._room = BLOCK_BYTES
            piece, rest = rest[: self._room], rest[self._room :]
            self.sums[-1] = crc32(piece, self.sums[-1])
            self._room -= len(piece)
        return self._file.write(content)


class _Blocks:
    """The numbers of a file and the checksums of its blocks, with a mark per block that was compared."""

    def __init__(self, path: Path, numbers: NDArray[Any], sums: NDArray[np.uint32]) -> None:
        self._path, self.numbers, self._sums = path, numbers, sums
        self._bytes: memoryview = numbers.view(np.uint8).data
        self._compared = bytearray(len(sums))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The numbers from `start` on and before `stop`. Raises DataError for a damaged block."""
        size = self.numbers.itemsize
        block, last = start * size // BLOCK_BYTES, _num_blocks(stop * size)
        while (block := self._compared.find(0, block, last)) >= 0:
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(self._bytes))
            if crc32(self._bytes[begin:end]) != self._sums[block]:
                raise DataError(
                    f"the token cache {self._path} is damaged: bytes {begin} to {end - 1} differ from their checksum. "
                    "Delete this file; the next run makes it again."
                )
            self._compared[block] = 1
        return self.numbers[start:stop]


class CheckedTokens:
    """Numbers of a file, read by slices; all that is read has been compared with its checksums.

    Args:
        path: of the file.
        numbers: all of the file, memory-mapped.
        sums: CRC-32 of each block of `BLOCK_BYTES`.

    Slices raise DataError for a damaged block.
    """

    def __init__(self, path: Path, numbers: NDArray[Any], sums: NDArray[np.uint32]) -> None:
        self._blocks, self._start, self._stop = _Blocks(path, numbers, sums), 0, len(numbers)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, place: slice) -> NDArray[Any]:
        start, stop, _ = place.indices(len(self))
        return self._blocks.read(self._start + start, self._start + max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def cut(self, start: int, stop: int) -> "CheckedTokens":
        """The numbers from `start` on and before `stop`, which are not read yet."""
        start, stop, _ = slice(start, stop).indices(len(self))
        found = object.__new__(CheckedTokens)
        found._blocks, found._start, found._stop = self._blocks, self._start + start, self._start + max(start, stop)
        return found


def cached_tokens(
    directory: Path, key: str, dtype: np.dtype[Any], form: Form, write: Callable[[BinaryIO], dict[str, Any]]
) -> tuple[CheckedTokens, dict[str, Any]]:
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


def open_tokens(directory: Path, key: str, dtype: np.dtype[Any], form: Form) -> tuple[CheckedTokens, dict[str, Any]]:
    """The numbers of a file that exists, and the JSON that describes them. Raises DataError."""
    about = read_about(directory, key, dtype, form)
    if about is None:
        raise DataError(f"the token cache {directory} has changed while it was read. Start the run again.")
    (facts, sums), path = about, _files(directory, key)[0]
    if not facts["num_tokens"]:  # an empty file cannot be mapped
        return CheckedTokens(path, np.empty(0, dtype), sums), facts
    with told(directory):
        numbers = np.asarray(np.memmap(path, dtype, "r", shape=(facts["num_tokens"],)))
    return CheckedTokens(path, numbers, sums), facts


def write_tokens(directory: Path, key: str, write: Callable[[BinaryIO], dict[str, Any]]) -> dict[str, Any]:
    """Write a file of tokens and the JSON that describes them; `write` as in `cached_tokens`. Raises OSError."""
    stream, about = _files(directory, key)
    with whole_file(stream) as out:
        summed = SummedFile(out)
        facts = write(cast(BinaryIO, summed))
    sums = np.asarray([*summed.sums, _sum_of(facts)], "<u4")
    write_whole(about, json.dumps({**facts, "checksums": sums.tobytes().hex()}))
    return facts


def read_about(
    directory: Path, key: str, dtype: np.dtype[Any], form: Form
) -> tuple[dict[str, Any], NDArray[np.uint32]] | None:
    """The JSON that describes a file of tokens, and the checksums of its blocks.

    None if the JSON or the file is missing, incomplete or without checksums, or if the JSON is damaged.
    """
    stream, about = _files(directory, key)
    try:
        facts = parse_json(about.read_bytes())
        size = stream.stat().st_size
        if not _fits(facts, {**form, "checksums": str}) or size != facts["num_tokens"] * dtype.itemsize:
            return None
        sums = np.frombuffer(bytes.fromhex(facts.pop("checksums")), "<u4")
        if len(sums) != _num_blocks(size) + 1 or sums[-1] != _sum_of(facts):
            return None
    except (OSError, ValueError, RecursionError):
        return None
    return facts, sums[:-1]


def _sum_of(facts: Mapping[str, Any]) -> int:
    return crc32(json.dumps(facts).encode())


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


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)
