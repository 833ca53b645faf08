"""Writes safetensors files as a stream, one tensor in memory at a time, and hashes them. Needs no torch.

The writer of the safetensors library takes all tensors at once and has its own error for a full disk. This one needs
the memory of one tensor, raises OSError, returns the hash of the bytes *meant* to be written, and calls fsync. The
library reads the files. The format is that of https://github.com/huggingface/safetensors: u64 header length, JSON
header, bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeloom.common.json_reader import parse_json
from pipeloom.common.recorded_file import BLOCK_BYTES, Bytes, FileRecord, PlainFile, RecordedFile
from pipeloom.errors import CheckpointError

# safetensors type -> bits per element.
_TYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16}
_TYPE_BITS |= {"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}


_MOST_ELEMENTS = 1 << 60  # torch counts elements and bytes in 64 bits


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write: its safetensors type, its shape, and a function that returns its bytes."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.dtype, self.shape)


class HashingFile:
    """A new file that is hashed as it is written, and synchronized to disk when closed without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in __exit__
        self._hash = hashlib.sha256()
        self._block, self._blocks = hashlib.sha256(), list[str]()
        self._size = 0

    def write(self, data: Any) -> None:
        """Write all of `data` (bytes or a contiguous byte buffer). Raises OSError with the file name."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        self._hash.update(view)
        self._hash_blocks(view)
        self._size += view.nbytes
        while view.nbytes:  # an unbuffered write may be partial (on Linux at most 2 GiB)
            try:
                written = self._file.write(view)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            view = view[written or 0 :]

    def _hash_blocks(self, view: memoryview) -> None:
        start = 0
        while start < view.nbytes:
            room = BLOCK_BYTES - (self._size + start) % BLOCK_BYTES
            piece = view[start : start + room]
            self._block.update(piece)
            start += piece.nbytes
            if piece.nbytes == room:
                self._blocks.append(self._block.hexdigest())
                self._block = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())

    @property
    def record(self) -> FileRecord:
        blocks = [*self._blocks, self._block.hexdigest()] if self._size % BLOCK_BYTES else self._blocks
        return FileRecord(self._size, self._hash.hexdigest(), tuple(blocks) if len(blocks) > 1 else ())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a new file and synchronize it to disk."""
    with HashingFile(path) as file:
        file.write(data)
    return file.record


def write_tensors(
    path: Path, tensors: Mapping[str, TensorSource], on_tensor: Callable[[], object] = lambda: None
) -> FileRecord:
    """Write a new safetensors file, in the order of `file_layout`; `on_tensor` is called before each tensor."""
    header, order = file_layout({name: (source.dtype, source.shape) for name, source in tensors.items()})
    with HashingFile(path) as file:
        file.write(header)
        for name in order:
            on_tensor()
            file.write(tensors[name].read())
    return file.record


def size_bytes(dtype: str, shape: Iterable[int]) -> int:
    """The size of a tensor of a safetensors type."""
    return math.prod(shape) * _TYPE_BITS[dtype] // 8


def file_layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where each tensor starts, in the order of the file.

    Wider types come first, so that each tensor is aligned; otherwise in the given order.

    Args:
        tensors: safetensors types and shapes by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if "__metadata__" in tensors:
        raise CheckpointError("a tensor has the name __metadata__, which safetensors reserves. Rename it.")
    offset, starts = 0, dict[str, int]()
    for name in sorted(tensors, key=lambda name: -_TYPE_BITS[tensors[name][0]]):  # the sort is stable
        dtype, shape = tensors[name]
        starts[name], end = offset, offset + size_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: len(begin) + start for name, start in starts.items()}


class TensorWriter:
    """A new safetensors file whose tensors are written in any order, one at a time.

    Args:
        path: of the file.
        tensors: as for `file_layout`.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        begin, self._starts = file_layout(tensors)
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in close
        self._write(begin, 0)

    def write(self, name: str, data: Any) -> None:
        """Write all bytes of a tensor (a contiguous byte buffer). Raises OSError with the file name."""
        self._write(data, self._starts[name])

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
        while view.nbytes:
            try:
                written = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """Synchronize the file to disk and close it."""
        with self._file:
            os.fsync(self._file.fileno())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: its bytes are `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int
    file: Bytes

    def read(self) -> bytes | bytearray:
        """All bytes of the tensor."""
        return self.file.read(self.start, self.stop)


def stored_tensors(path: Path, file: Bytes | None = None) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in order; reads the header alone.

    Args:
        path: of the file.
        file: what reads it; None: nothing is compared.

    Raises:
        CheckpointError: the file is not a safetensors file, or its end is missing.
        OSError: the file cannot be read.
    """
    file = PlainFile(path) if file is None else file
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else 0
    if length > file.size - 8:
        seen = (
            "is empty" if file.size == 0 else f"has {file.size:,} bytes, and by its first number a header of {length:,}"
        )
        raise CheckpointError(f"{path} {seen}: it is damaged, or has another format. Use another checkpoint.")
    found: dict[str, StoredTensor] | None = None
    with suppress(ValueError, KeyError, TypeError):
        header = dict(parse_json(bytes(file.read(8, 8 + length))))
        header.pop("__metadata__", None)
        found = {name: _stored(path, file, 8 + length, **entry) for name, entry in header.items()}
    if found is None:
        raise CheckpointError(
            f"{path}: its header is not valid safetensors JSON; the file is damaged or has another format. Use another "
            "checkpoint."
        )
    end = max((tensor.stop for tensor in found.values()), default=0)
    if end > file.size:
        raise CheckpointError(f"{path} has {file.size} bytes instead of {end}: its end is missing. Copy it again.")
    return found


def _stored(
    path: Path, file: Bytes, base: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> StoredTensor:
    start, stop = data_offsets
    if any(type(each) is not int or each < 0 for each in (start, stop, *shape)) or not isinstance(shape, list):
        raise TypeError("sizes must be integers of at least 0")
    if stop - start != size_bytes(dtype, shape) or math.prod(max(1, each) for each in shape) > _MOST_ELEMENTS:
        raise ValueError("sizes differ, or a shape is too large")
    return StoredTensor(dtype, tuple(shape), path, base + start, base + stop, file)


def tensor_sources(path: Path, record: FileRecord | None = None) -> dict[str, TensorSource]:
    """The tensors of a safetensors file, in order, to list or copy them without torch. Raises as `stored_tensors`.

    Args:
        path: of the file.
        record: with which what is read is compared; None: nothing is.
    """
    stored = stored_tensors(path, None if record is None else RecordedFile(path, record))
    return {name: TensorSource(each.dtype, each.shape, each.read) for name, each in stored.items()}
