"""Reads full tensors or ranges of their elements from the files of a checkpoint."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.common.recorded_file import FileRecord
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, unwrapped
from pipeloom.pretrained.checked_tensors import CheckedTensors
from pipeloom.train.checkpoint.block_shards import BlockShard
from pipeloom.train.checkpoint.boxes import Box, boxes_of, cover_box
from pipeloom.train.checkpoint.pieces import Piece, cover


class StoredTensors(Protocol):
    """The tensors of a file by name, as `safetensors.safe_open` gives them."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> Any: ...
    def get_tensor(self, name: str) -> Tensor: ...


class TensorFiles:
    """The safetensors files of a checkpoint, opened lazily.

    Args:
        path: the checkpoint.
        records: of files; what is read of these is compared with their hashes before it is returned.
        opened: files that are not in the directory, by name.

    Methods raise CheckpointError, with the file name, if a file cannot be read or is damaged.
    """

    def __init__(
        self, path: Path, records: Mapping[str, FileRecord], opened: Mapping[str, StoredTensors] | None = None
    ) -> None:
        self._path, self._records = path, records
        self._open: dict[str, Any] = dict(opened or {})

    def everything(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file by name."""
        return {name: self.full(Piece(file, name, None)) for name in self._file(file).keys()}  # noqa: SIM118

    def shape(self, pieces: list[Piece]) -> tuple[int, ...]:
        """The shape of the full tensor."""
        part = pieces[0].range
        return tuple(self._entry(pieces[0]).get_shape()) if part is None else part.shape

    def types(self, label: str, pieces: list[Piece], part: Range | Box | None) -> list[str]:
        """The safetensors types of all pieces with elements of a tensor or of a `part` of it.

        Args:
            label: the tensor in error messages.
            pieces: all pieces of the tensor.
            part: a range of elements, or a box; None for the full tensor.
        """
        return [self._entry(piece).get_dtype() for piece in self._sources(label, pieces, part)]

    def tensor(self, label: str, pieces: list[Piece], part: Range | Box | None = None, *, read: bool = True) -> Tensor:
        """A full tensor or a box of it in its shape, or a range of its elements in one dimension; see `types`.

        Without `read`, the tensor is on the meta device.
        """
        if not read:
            self._sources(label, pieces, part)
            if part is None:
                return torch.empty(self.shape(pieces), device="meta")
            return torch.empty(part.extents if isinstance(part, Box) else (part.stop - part.start,), device="meta")
        if part is None and pieces[0].range is None:
            return self.full(pieces[0])
        if isinstance(part, Box):
            return self._box(label, pieces, part)
        if isinstance(pieces[0].range, Box):
            boxes = boxes_of(part or self._everything(pieces))
            flat = _joined([self._box(label, pieces, box).reshape(-1) for box in boxes])
            return flat.reshape(self.shape(pieces)) if part is None else flat
        found = [self._elements(piece, first, end) for piece, first, end in self._found(label, pieces, part)]
        flat = found[0] if len(found) == 1 else _joined(found)
        return flat.reshape(self.shape(pieces)) if part is None else flat

    def shard(self, label: str, pieces: list[Piece], shard: BlockShard, *, read: bool = True) -> Tensor:
        """The elements of a shard in one dimension, where padding is 0; arguments as for `tensor`."""
        found: Tensor | None = None
        for box in shard.boxes(owned_only=False):
            values = self.tensor(label, pieces, box, read=read)
            if found is None:
                found = values.new_zeros(shard.num_elements)
            if read:
                shard.view(found, box).copy_(values)
        return torch.zeros(shard.num_elements, device="cpu" if read else "meta") if found is None else found

    def _everything(self, pieces: list[Piece]) -> Range:
        shape = self.shape(pieces)
        return Range(0, math.prod(shape), shape)

    def _sources(self, label: str, pieces: list[Piece], part: Range | Box | None) -> list[Piece]:
        """The pieces with the elements of `part`, each once."""
        if isinstance(pieces[0].range, Box):
            boxes = [part] if isinstance(part, Box) else boxes_of(part or self._everything(pieces))
            found = (piece for box in boxes for piece, _, _ in self._boxes(label, pieces, box))
        elif isinstance(part, Box):
            found = (piece for piece, _, _ in self._found(label, pieces, _rows(part)))
        else:
            found = (piece for piece, _, _ in self._found(label, pieces, part))
        return list(dict.fromkeys(found))

    def _found(self, label: str, pieces: list[Piece], part: Range | None) -> list[tuple[Piece, int, int]]:
        """The pieces with the elements of `part`, each with the range needed, relative to the piece."""
        full = self._everything(pieces)
        start, stop, _ = part or full
        ranges = [(piece.range if isinstance(piece.range, Range) else full, piece) for piece in pieces]
        return cover(f"{label} in {self._path}", ranges, start, stop)

    def _boxes(self, label: str, pieces: list[Piece], wanted: Box) -> list[tuple[Piece, Box, Box]]:
        """The pieces with elements of a box, each with its own box and the elements that both have."""
        boxes = [(piece.range, piece) for piece in pieces if isinstance(piece.range, Box)]
        found = cover_box(f"{label} in {self._path}", boxes, wanted)
        for piece, box, _ in found:
            if tuple(shape := self._entry(piece).get_shape()) != box.extents:
                raise CheckpointError(
                    f"{piece.key} in {self._path / piece.file} has shape {tuple(shape)}, not that of its block "
                    f"{box.extents}: the file does not fit the manifest. Use another checkpoint."
                )
        return found

    def _box(self, label: str, pieces: list[Piece], wanted: Box) -> Tensor:
        """The elements of a box, in its shape."""
        if isinstance(pieces[0].range, Box):
            joined: Tensor | None = None
            for piece, box, common in self._boxes(label, pieces, wanted):
                part = self._slice(piece, common.slices_in(box))
                if common == wanted:
                    return part
                if joined is None:
                    joined = part.new_empty(wanted.extents)
                joined[common.slices_in(wanted)] = part
            assert joined is not None
            return joined
        if pieces[0].range is None:
            return self._slice(pieces[0], wanted.slices_in())
        rows = self.tensor(label, pieces, _rows(wanted)).reshape(-1, *wanted.shape[1:])
        return rows[(slice(None), *wanted.slices_in()[1:])].clone()

    def _slice(self, piece: Piece, slices: tuple[slice, ...]) -> Tensor:
        if not slices:
            return self.full(piece)
        found: Tensor = self._get(piece, lambda file: file.get_slice(piece.key)[slices])
        return found.clone()

    def full(self, piece: Piece) -> Tensor:
        """A tensor as stored. Cloned, because the library returns views of a mapped file, which may be unaligned."""
        tensor: Tensor = self._get(piece, lambda file: file.get_tensor(piece.key))
        return tensor.clone()

    def _elements(self, piece: Piece, start: int, stop: int) -> Tensor:
        """A range of elements of a tensor, [stop - start]; reads only the enclosing slice of the file."""
        left, position, index = math.prod(shape := self._entry(piece).get_shape()), 0, []
        if isinstance(piece.range, Range) and left != piece.range.num_elements:
            raise CheckpointError(
                f"{piece.key} in {self._path / piece.file} has {left} elements instead of {piece.range.num_elements}: "
                "the file does not fit the manifest. Use another checkpoint."
            )
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
        except (SafetensorError, OSError, UnicodeEncodeError) as error:  # the last: of a name
            raise CheckpointError(
                f"{self._path / piece.file} cannot be read ({unwrapped(str(error))}). Check the file, or use "
                "another checkpoint."
            ) from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            record, path = self._records.get(file), self._path / file
            self._open[file] = (
                safe_open(path, framework="pt", device="cpu") if record is None else CheckedTensors(path, record)
            )
        return self._open[file]


def _rows(box: Box) -> Range:
    """The range of elements from the first to the last row with elements of a box."""
    row = math.prod(box.shape[1:])
    return Range(box.starts[0] * row, box.stops[0] * row, box.shape) if box.shape else Range(0, 1, ())


def _joined(pieces: list[Tensor]) -> Tensor:
    """Concatenate; torch.cat does not support all dtypes."""
    joined = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for target, piece in zip(torch.split(joined, [piece.numel() for piece in pieces]), pieces, strict=True):
        target.copy_(piece)
    return joined
