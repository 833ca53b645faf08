"""Reading a checkpoint, by name, into whatever layout the reader has. Nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.runtime.ranges import Range
from pipeloom.train.checkpoint.directory import resolve
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    Manifest,
    read_manifest,
    read_weight_map,
    root_name,
    verify_file,
)
from pipeloom.train.checkpoint.pieces import Piece, cover, stored_model, stored_optimizer
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, RandomState, is_elementwise, load_optimizer_state


def load(path: Path, *, verify_files: bool = True) -> Checkpoint:
    """Open a checkpoint, or the latest one of an output directory. Tensors are read when asked for.

    With `verify_files` each file is compared with its hash before its first use; pass False after `verify(path)`.
    Raises CheckpointError for a directory that is missing, foreign, damaged or of another format version.
    """
    return Checkpoint(resolve(Path(path)), verify_files=verify_files)


class Checkpoint:
    """A checkpoint opened for reading: `.step`, `.state`, `.layout`, and loaders by name."""

    def __init__(self, path: Path, *, verify_files: bool = True) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._unverified = set(self.manifest.files) if verify_files else set()
        self._open_files: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's own state, as it was given to `save`."""
        return self.manifest.state

    @property
    def layout(self) -> dict[str, Any]:
        return self.manifest.layout

    @property
    def num_parts(self) -> int:
        """How many ranks wrote it."""
        return len(self.manifest.parts)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name; of a tensor in pieces each piece, as ``NAME[start:stop]``."""
        self._check(INDEX_NAME)
        return read_weight_map(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor of the model, whole, on the CPU, by any of its names. Raises CheckpointError if there is none."""
        return self._tensor(name, self._pieces_of(name))

    def load_model(
        self,
        tensors: Mapping[str, Tensor],
        ranges: Mapping[str, Range] | None = None,
        *,
        all_names: Collection[str] | None = None,
    ) -> None:
        """Copy saved values into `tensors` (this rank's parameters and buffers, by name), in place.

        Only what is needed is read, however the ranks that saved it had cut it.

        Args:
            tensors: whole, or, where `ranges` says so, with the elements of a range.
            ranges: see `save`.
            all_names: every name of the whole model's `state_dict()`; with it, a tensor that only the checkpoint has
                is an error too.

        Raises CheckpointError naming the tensor, before any is changed, if name, shape or dtype differ.
        """
        if all_names is not None:
            known = {self._stored_name(name) for name in all_names}
            if extra := sorted(self._model.keys() - known):
                raise CheckpointError(f"{self.path} has {extra[0]}, the model has not: it is of another model")
        ranges = ranges or {}
        for name, tensor in tensors.items():
            self._check_fits(name, tensor, ranges.get(name))
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.numel() or name not in ranges:
                    loaded = self._tensor(name, self._pieces_of(name), ranges.get(name))
                    tensor.copy_(loaded.reshape(tensor.shape))

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        ranges: Mapping[str, Range] | None = None,
    ) -> None:
        """Restore the state and hyperparameters of `optimizer`; `names` gives each of its parameters its name.

        `ranges`: see `save`. State with a number for each element is cut as the parameter is, other state (a count of
        steps) is the same for all parts. A parameter without elements gets no state.

        Raises CheckpointError, before anything is changed, when the checkpoint was not saved with this optimizer, or
        has state that belongs to whole parameters (row and column sums) for a parameter that is cut here.
        """
        classes = {part.optimizer_class for part in self.manifest.parts if part.optimizer_class}
        if not classes:
            raise CheckpointError(f"{self.path} has no optimizer state: load the model only, or use another checkpoint")
        ranges = ranges or {}
        load_optimizer_state(
            optimizer,
            names,
            optimizer_class=", ".join(sorted(classes)),
            options_of=lambda name: self._param_options.get(self._stored_name(name)),
            state_of=lambda name: self._optimizer_state_of(name, ranges.get(name)),
        )

    def random(self, rank: int, size: int) -> RandomState | None:
        """The generator states of `rank`; None when the checkpoint was saved by another number of ranks, or without."""
        if size != self.num_parts or (part := self.manifest.parts[rank]).random is None:
            return None
        return RandomState(
            {name: self._whole(Piece(part.random, name, None)) for name in self._keys(part.random)},
            part.random_values,
        )

    @cached_property
    def _param_options(self) -> dict[str, dict[str, Any]]:
        groups = [group for part in self.manifest.parts for group in part.param_groups]
        return {name: group["options"] for group in groups for name in group["parameters"]}

    @cached_property
    def _model(self) -> dict[str, list[Piece]]:
        return stored_model(self.manifest, self.weight_map)

    @cached_property
    def _optimizer_tensors(self) -> dict[str, dict[str, list[Piece]]]:
        return stored_optimizer(self.manifest)

    @cached_property
    def _optimizer_values(self) -> dict[str, dict[str, Any]]:
        return {name: values for part in self.manifest.parts for name, values in part.optimizer_values.items()}

    def _optimizer_state_of(self, name: str, part: Range | None) -> dict[str, Any]:
        if part is not None and part.start == part.stop:
            return {}
        stored = self._stored_name(name)
        state: dict[str, Any] = {}
        for key, pieces in self._optimizer_tensors.get(stored, {}).items():
            what = f"optimizer state {key!r} of {name}"
            shape = self._shape(pieces)
            if part is None or self._is_cut(key, shape, part):
                state[key] = self._tensor(what, pieces, part)
            elif math.prod(shape) == 1:  # the same for all parts
                state[key] = self._whole(pieces[0])
            else:
                raise CheckpointError(
                    f"{what} has shape {shape} in {self.path} and belongs to the whole parameter {part.shape}: a part "
                    "has none of it; resume in the layout it was saved in, or one that keeps parameters whole"
                )
        return {**state, **self._optimizer_values.get(stored, {})}

    @staticmethod
    def _is_cut(key: str, shape: tuple[int, ...], part: Range) -> bool:
        """Whether saved state of this shape is cut along with a parameter."""
        if shape == part.shape == ():
            return key != "step"  # a number itself, and all of its state too
        return is_elementwise(shape, Range(0, math.prod(part.shape), part.shape))

    def _stored_name(self, name: str) -> str:
        return name if name in self._model else root_name(name, self.manifest.ties)

    def _pieces_of(self, name: str) -> list[Piece]:
        stored = self._stored_name(name)
        if stored not in self._model:
            raise CheckpointError(f"{self.path} has no tensor {name}: it is of another model")
        return self._model[stored]

    def _check_fits(self, name: str, tensor: Tensor, part: Range | None) -> None:
        pieces = self._pieces_of(name)
        if part is not None and tensor.numel() != part.stop - part.start:
            raise CheckpointError(
                f"{name} has {tensor.numel()} elements here and the range {part.start} to {part.stop}: a tensor has "
                "the elements of its range; give both of one layout"
            )
        if part is not None and not tensor.numel():
            return
        wanted = (
            tuple(tensor.shape) if part is None else part.shape,
            SAFETENSORS_TYPES.get(tensor.dtype, str(tensor.dtype)),
        )
        saved = (self._shape(pieces), self._entry(pieces[0]).get_dtype())
        for what, old, new in zip(("shape", "type"), saved, wanted, strict=True):
            if old != new:
                raise CheckpointError(
                    f"{name} has {what} {old} in {self.path} and {new} in the model: they must be equal; "
                    f"build the model as it was when it was saved"
                )

    def _shape(self, pieces: list[Piece]) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        part = pieces[0].range
        return tuple(self._entry(pieces[0]).get_shape()) if part is None else part.shape

    def _tensor(self, what: str, pieces: list[Piece], part: Range | None = None) -> Tensor:
        """A whole tensor in its shape, or part of it in one dimension, out of whatever holds it."""
        shape = self._shape(pieces)
        if part is None and pieces[0].range is None:
            return self._whole(pieces[0])
        start, stop, _ = part or Range(0, math.prod(shape), shape)
        sources = [(piece.range or Range(0, math.prod(shape), shape), piece) for piece in pieces]
        found = cover(f"{what} in {self.path}", sources, start, stop)
        read = [self._elements(piece, first, end) for piece, first, end in found]
        flat = read[0] if len(read) == 1 else _joined(read)
        return flat.reshape(shape) if part is None else flat

    def _whole(self, piece: Piece) -> Tensor:
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
            return self._whole(piece).reshape(1)
        rows: Tensor = self._get(piece, lambda file: file.get_slice(piece.key)[tuple(index)])
        return rows.reshape(-1)[start - position : stop - position].clone()

    def _entry(self, piece: Piece) -> Any:
        return self._get(piece, lambda file: file.get_slice(piece.key))

    def _get(self, piece: Piece, get: Callable[[Any], Any]) -> Any:
        try:
            return get(self._file(piece.file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path / piece.file} cannot be read ({error}): use another checkpoint"
            ) from error

    def _keys(self, file: str) -> list[str]:
        return list(self._file(file).keys())

    def _file(self, file: str) -> Any:
        if file not in self._open_files:
            self._check(file)
            self._open_files[file] = safe_open(self.path / file, framework="pt", device="cpu")
        return self._open_files[file]

    def _check(self, file: str) -> None:
        if file in self._unverified:
            verify_file(self.path, file, self.manifest.files[file])
            self._unverified.discard(file)


def _joined(pieces: list[Tensor]) -> Tensor:
    """One after the other; torch.cat does not do it in every type."""
    whole = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for target, piece in zip(torch.split(whole, [piece.numel() for piece in pieces]), pieces, strict=True):
        target.copy_(piece)
    return whole
