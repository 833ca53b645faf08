"""Reads full tensors or ranges of their elements from the files of a checkpoint."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import Piece, cover, verify_file
from pipeloom.train.checkpoint.tensor_file import FileRecord


class TensorFiles:
    """The safetensors files of a checkpoint, opened lazily.

    Args:
        path: the checkpoint.
        unverified: files to compare with their record before the first use; see `verify_file`.

    Methods raise CheckpointError, with the file name, if a file cannot be read.
    """

    def __init__(self, path: Path, unverified: Mapping[str, FileRecord]) -> None:
        self._path = path
        self._unverified = dict(unverified)
        self._open: dict[str, Any] = {}

    def verify(self, file: str) -> None:
        """Compare a file with its record, once."""
        if file in self._unverified:
            verify_file(self._path, file, self._unverified[file])
            del self._unverified[file]

    def everything(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file by name."""
        return {name: self.full(Piece(file, name, None)) for name in self._file(file).keys()}  # noqa: SIM118

    def shape(self, pieces: list[Piece]) -> tuple[int, ...]:
        """The shape of the full tensor."""
        part = pieces[0].range
        return tuple(self._entry(pieces[0]).get_shape()) if part is None else part.shape

    def types(self, label: str, pieces: list[Piece], part: Range | None) -> list[str]:
        """The safetensors types of all pieces with elements of a tensor or of its range `part`.

        Args:
            label: the tensor in error messages.
            pieces: all pieces of the tensor.
            part: a range of elements; None for the full tensor.
        """
        return [self._entry(piece).get_dtype() for piece, _, _ in self._found(label, pieces, part)]

    def tensor(self, label: str, pieces: list[Piece], part: Range | None = None, *, read: bool = True) -> Tensor:
        """A full tensor in its shape, or a range of its elements in one dimension; arguments as for `types`.

        Without `read`, the tensor is on the meta device.
        """
        if not read:
            self._found(label, pieces, part)
            return torch.empty(self.shape(pieces) if part is None else (part.stop - part.start,), device="meta")
        if part is None and pieces[0].range is None:
            return self.full(pieces[0])
        found = [self._elements(piece, first, end) for piece, first, end in self._found(label, pieces, part)]
        flat = found[0] if len(found) == 1 else _joined(found)
        return flat.reshape(self.shape(pieces)) if part is None else flat

    def _found(self, label: str, pieces: list[Piece], part: Range | None) -> list[tuple[Piece, int, int]]:
        """The pieces with the elements of `part`, each with the range needed, relative to the piece."""
        shape = self.shape(pieces)
        full = Range(0, math.prod(shape), shape)
        start, stop, _ = part or full
        return cover(f"{label} in {self._path}", [(piece.range or full, piece) for piece in pieces], start, stop)

    def full(self, piece: Piece) -> Tensor:
        """A tensor as stored. Cloned, because the library returns views of a mapped file, which may be unaligned."""
        tensor: Tensor = self._get(piece, lambda file: file.get_tensor(piece.key))
        return tensor.clone()

    def _elements(self, piece: Piece, start: int, stop: int) -> Tensor:
        """A range of elements of a tensor, [stop - start]; reads only the enclosing slice of the file."""
        left, position, index = math.prod(shape := self._entry(piece).get_shape()), 0, []
        for size in shape:  # narrow each dimension to a single index, down to the first that the range spans
            left //= size
            first, last = (start - position) // left, (stop - 1 - position) // left
            index.append(slice(first, last + 1))
            position += first * left
            if first < last:
                break
        if not index:
            return self.full(piece).reshape(1)
        rows: Tensor = self._get(piece, lambda file: file.get_slice(piece.key)[tuple(index)])
        return rows.reshape(-1)[start - position : stop - position].clone()

    def _entry(self, piece: Piece) -> Any:
        return self._get(piece, lambda file: file.get_slice(piece.key))

    def _get(self, piece: Piece, get: Callable[[Any], Any]) -> Any:
        try:
            return get(self._file(piece.file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._path / piece.file} cannot be read ({error}). Check the file, or use another checkpoint."
            ) from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            self.verify(file)
            self._open[file] = safe_open(self._path / file, framework="pt", device="cpu")
        return self._open[file]


def _joined(pieces: list[Tensor]) -> Tensor:
    """Concatenate; torch.cat does not support all dtypes."""
    joined = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for target, piece in zip(torch.split(joined, [piece.numel() for piece in pieces]), pieces, strict=True):
        target.copy_(piece)
    return joined
