"""Tensors out of the files of a checkpoint, whole or only the elements wanted, from all pieces that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import verify_file
from pipeloom.train.checkpoint.pieces import Piece, cover
from pipeloom.train.checkpoint.tensor_file import FileRecord


class TensorFiles:
    """The safetensors files of the checkpoint `path`, opened at their first use.

    A file in `unverified` is compared with its record before; see `verify_file`. What cannot be read is a
    CheckpointError that names the file.
    """

    def __init__(self, path: Path, unverified: Mapping[str, FileRecord]) -> None:
        self._path = path
        self._unverified = dict(unverified)
        self._open: dict[str, Any] = {}

    def verify(self, file: str) -> None:
        """Compare a file with its record, unless that was done."""
        if file in self._unverified:
            verify_file(self._path, file, self._unverified[file])
            del self._unverified[file]

    def keys(self, file: str) -> list[str]:
        """The names in a file."""
        return list(self._file(file).keys())

    def shape(self, pieces: list[Piece]) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        part = pieces[0].range
        return tuple(self._entry(pieces[0]).get_shape()) if part is None else part.shape

    def types(self, what: str, pieces: list[Piece], part: Range | None) -> list[str]:
        """The types, as safetensors names them, of all pieces that a tensor or a part of it lies in."""
        return [self._entry(piece).get_dtype() for piece, _, _ in self._found(what, pieces, part)]

    def tensor(self, what: str, pieces: list[Piece], part: Range | None = None) -> Tensor:
        """A whole tensor in its shape, or part of it in one dimension, out of whatever holds it."""
        if part is None and pieces[0].range is None:
            return self.whole(pieces[0])
        read = [self._elements(piece, first, end) for piece, first, end in self._found(what, pieces, part)]
        flat = read[0] if len(read) == 1 else _joined(read)
        return flat.reshape(self.shape(pieces)) if part is None else flat

    def outline(self, what: str, pieces: list[Piece], part: Range | None = None) -> Tensor:
        """What `tensor` gives, without values, where it is all there."""
        self._found(what, pieces, part)
        shape = self.shape(pieces) if part is None else (part.stop - part.start,)
        return torch.empty(shape, device="meta")

    def _found(self, what: str, pieces: list[Piece], part: Range | None) -> list[tuple[Piece, int, int]]:
        """Where the elements of a part, or of the whole tensor, lie: pieces, and the first and last of each."""
        shape = self.shape(pieces)
        whole = Range(0, math.prod(shape), shape)
        start, stop, _ = part or whole
        return cover(what, [(piece.range or whole, piece) for piece in pieces], start, stop)

    def whole(self, piece: Piece) -> Tensor:
        """The library's tensors are views of a mapped file; a clone is aligned and outlives the checkpoint."""
        tensor: Tensor = self._get(piece, lambda file: file.get_tensor(piece.key))
        return tensor.clone()

    def _elements(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Elements of a tensor in a file, read without most of the others; [stop - start]."""
        left, position, index = math.prod(shape := self._entry(piece).get_shape()), 0, []
        for size in shape:  # the rows that they lie in; where that is one, the rows of that one
            left //= size
            first, last = (start - position) // left, (stop - 1 - position) // left
            index.append(slice(first, last + 1))
            position += first * left
            if first < last:
                break
        if not index:
            return self.whole(piece).reshape(1)
        rows: Tensor = self._get(piece, lambda file: file.get_slice(piece.key)[tuple(index)])
        return rows.reshape(-1)[start - position : stop - position].clone()

    def _entry(self, piece: Piece) -> Any:
        return self._get(piece, lambda file: file.get_slice(piece.key))

    def _get(self, piece: Piece, get: Callable[[Any], Any]) -> Any:
        try:
            return get(self._file(piece.file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._path / piece.file} cannot be read ({error}): use another checkpoint"
            ) from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            self.verify(file)
            self._open[file] = safe_open(self._path / file, framework="pt", device="cpu")
        return self._open[file]


def _joined(pieces: list[Tensor]) -> Tensor:
    """One after the other; torch.cat does not do it in every type."""
    whole = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for target, piece in zip(torch.split(whole, [piece.numel() for piece in pieces]), pieces, strict=True):
        target.copy_(piece)
    return whole
