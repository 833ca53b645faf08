"""Reading a checkpoint, by name, into whatever layout the reader has. Nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.directory import resolve
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    Manifest,
    read_manifest,
    read_weight_map,
    root_name,
)
from pipeloom.train.checkpoint.pieces import Piece, stored_model, stored_optimizer
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, RandomState, is_elementwise, load_optimizer_state
from pipeloom.train.checkpoint.tensor_reader import TensorFiles


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
        self._files = TensorFiles(path, self.manifest.files if verify_files else {})

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
    def compute_type(self) -> str | None:
        """The type in which the model computes, where its parameters here are masters in another."""
        return self.manifest.compute_type

    @property
    def num_parts(self) -> int:
        """How many ranks wrote it."""
        return len(self.manifest.parts)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name; of a tensor in pieces each piece, as ``NAME[start:stop]``."""
        self._files.verify(INDEX_NAME)
        return read_weight_map(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor of the model, whole, on the CPU, by any of its names. Raises CheckpointError if there is none."""
        return self._files.tensor(f"{name} in {self.path}", self._pieces_of(name))

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
                    loaded = self._files.tensor(f"{name} in {self.path}", self._pieces_of(name), ranges.get(name))
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
            state_of=lambda name, read: self._optimizer_state_of(name, ranges.get(name), read=read),
        )

    def random(self, rank: int, size: int) -> RandomState | None:
        """The generator states of `rank`; None when the checkpoint was saved by another number of ranks, or without."""
        if size != self.num_parts or (part := self.manifest.parts[rank]).random is None:
            return None
        return RandomState(
            {name: self._files.whole(Piece(part.random, name, None)) for name in self._files.keys(part.random)},
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

    def _optimizer_state_of(self, name: str, part: Range | None, *, read: bool) -> dict[str, Any]:
        """The state of a parameter, or of a part of it; unless it is to be `read`, tensors on the meta device."""
        if part is not None and part.start == part.stop:
            return {}
        stored = self._stored_name(name)
        state: dict[str, Any] = {}
        for key, pieces in self._optimizer_tensors.get(stored, {}).items():
            what = f"optimizer state {key!r} of {name}"
            shape = self._files.shape(pieces)
            if part is None or self._is_cut(key, shape, part):
                get = self._files.tensor if read else self._files.outline
                state[key] = get(f"{what} in {self.path}", pieces, part)
            elif math.prod(shape) == 1:  # the same for all parts
                state[key] = self._files.whole(pieces[0])
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
        wanted = tuple(tensor.shape) if part is None else part.shape
        dtype = SAFETENSORS_TYPES.get(tensor.dtype, str(tensor.dtype))
        saved: list[tuple[str, Any, Any]] = [("shape", self._files.shape(pieces), wanted)]
        if saved[0][1] == wanted:
            saved += [("type", found, dtype) for found in self._files.types(f"{name} in {self.path}", pieces, part)]
        for what, old, new in saved:
            if old != new:
                raise CheckpointError(
                    f"{name} has {what} {old} in {self.path} and {new} in the model: they must be equal; "
                    f"build the model as it was when it was saved"
                )
