"""Files with a record of their size and hashes, of which each part is compared with it as it is read."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pipeloom.errors import CheckpointError

BLOCK_BYTES = 1 << 22
"""Of a longer file, each block of this size has a hash of its own, so that a part can be read and checked."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of a file in a manifest.

    Attributes:
        bytes: its size.
        sha256: the hash of the whole.
        blocks: hashes of its blocks of `BLOCK_BYTES`, the last of what is left; empty if it is not longer than one, or
            if an earlier release wrote it.
    """

    bytes: int
    sha256: str
    blocks: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The record of a manifest. Raises ValueError, KeyError or TypeError for wrong content."""
        record = cls(int(row["bytes"]), str(row["sha256"]), tuple(map(str, row.get("blocks", ()))))
        if record.blocks and len(record.blocks) != -(-record.bytes // BLOCK_BYTES):
            raise ValueError(f"{len(record.blocks)} blocks of a file of {record.bytes} bytes")
        return record

    def to_dict(self) -> dict[str, Any]:
        """JSON; without the blocks if there are none."""
        row = {"bytes": self.bytes, "sha256": self.sha256}
        return {**row, "blocks": list(self.blocks)} if self.blocks else row


def is_file_name(name: object) -> bool:
    """Whether `name` can be the name of a file in a directory: never read outside of it."""
    return isinstance(name, str) and name.isprintable() and name not in ("", "..") and Path(name).name == name


class Bytes(Protocol):
    """A file that is read in parts."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read(self, start: int, stop: int) -> bytes | bytearray:
        """Bytes `start` to `stop`; fewer if the file ends before."""


class PlainFile:
    """A file without a record. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path, self.size = path, path.stat().st_size

    def read(self, start: int, stop: int) -> bytes | bytearray:
        """Bytes `start` to `stop`; fewer if the file ends before."""
        with open(self._path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)


class RecordedFile:
    """A file whose bytes are compared with its record as they are read: what is returned was hashed in memory.

    Args:
        path: of the file.
        record: its size and hashes. Of a longer file without hashes of blocks, the whole is hashed here.

    Methods raise OSError, and CheckpointError for a file that differs.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record, self.size = path, record, record.bytes
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the object
        self._last: tuple[int, bytes] = (-1, b"")
        size = os.fstat(self._file.fileno()).st_size  # fast, so compare it before a hash
        if size != record.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes instead of {record.bytes}. Use another checkpoint."
            )
        self._hashes = record.blocks or ((record.sha256,) if size <= BLOCK_BYTES else ())
        if not self._hashes:
            self._compare(hashlib.file_digest(self._file, "sha256").hexdigest(), record.sha256)

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop`; fewer if the file ends before."""
        stop = min(stop, self.size)
        found = bytearray(max(0, stop - start))
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            begin = block * BLOCK_BYTES
            first, last = max(start, begin), min(stop, begin + BLOCK_BYTES)
            found[first - start : last - start] = memoryview(self._block(block))[first - begin : last - begin]
        return found

    def _block(self, block: int) -> bytes:
        if self._last[0] != block:
            begin = block * BLOCK_BYTES
            data = _read_fully(self._file.fileno(), begin, min(self.size, begin + BLOCK_BYTES))
            if self._hashes:
                self._compare(hashlib.sha256(data).hexdigest(), self._hashes[block])
            self._last = block, data
        return self._last[1]

    def _compare(self, found: str, recorded: str) -> None:
        if found != recorded:
            raise CheckpointError(
                f"{self._path} is damaged: its SHA-256 differs from the manifest. Use another checkpoint."
            )


def _read_fully(descriptor: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
