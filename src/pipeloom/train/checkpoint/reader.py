"""Loads a checkpoint by parameter name into any layout. Nothing is unpickled."""

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
from pipeloom.train.checkpoint.pieces import Piece, size_mismatch, stored_model, stored_optimizer
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, RandomState, is_elementwise, load_optimizer_state
from pipeloom.train.checkpoint.tensor_reader import TensorFiles


def load(path: Path, *, verify_files: bool = True) -> Checkpoint:
    """Open a checkpoint, or the latest one in an output directory. Tensors are read lazily.

    Args:
        path: the checkpoint or output directory.
        verify_files: whether to compare each file with its hash before its first use; pass False after `verify(path)`.

    Raises:
        CheckpointError: the directory is missing, damaged, not a checkpoint, or of an unsupported version.
    """
    return Checkpoint(resolve(Path(path)), verify_files=verify_files)


class Checkpoint:
    """A checkpoint that is open for reading: its step, state and layout, and methods that load tensors by name."""

    def __init__(self, path: Path, *, verify_files: bool = True) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._files = TensorFiles(path, self.manifest.files if verify_files else {})

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The state of the trainer that was passed to `save`."""
        return self.manifest.state

    @property
    def layout(self) -> dict[str, Any]:
        return self.manifest.layout

    @property
    def compute_type(self) -> str | None:
        """The dtype of the model's computations, if the parameters here are main parameters of another dtype."""
        return self.manifest.compute_type

    @property
    def num_parts(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return len(self.manifest.parts)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name; a sharded tensor has an entry ``NAME[start:stop]`` per piece."""
        self._files.verify(INDEX_NAME)
        return read_weight_map(self.path)

    def tensor(self, name: str) -> Tensor:
        """A full tensor of the model by any of its names, on the CPU. Raises CheckpointError for an unknown name."""
        return self._files.tensor(f"{name} in {self.path}", self._pieces_of(name))

    def load_model(
        self,
        tensors: Mapping[str, Tensor],
        ranges: Mapping[str, Range] | None = None,
        *,
        all_names: Collection[str] | None = None,
    ) -> None:
        """Copy saved values into `tensors` in place. Reads only the elements needed, from any saved layout.

        Args:
            tensors: parameters and buffers of this rank by name: full tensors, or shards of the given `ranges`.
            ranges: see `save`.
            all_names: all names in the `state_dict()` of the full model; if given, a tensor that is only in the
                checkpoint is an error too.

        Raises:
            CheckpointError: a name, shape or dtype differs. No tensor is changed then.
        """
        if all_names is not None:
            known = {self._stored_name(name) for name in all_names}
            if extra := sorted(self._model.keys() - known):
                raise CheckpointError(
                    f"the model has no tensor {extra[0]} of {self.path}. It was saved from a different model."
                )
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
        """Restore the state and hyperparameters of `optimizer`.

        State with one number per element is sharded like its parameter. Other state, such as a step count, is the same
        for all shards. A parameter without elements gets no state.

        Args:
            optimizer: the optimizer of this rank.
            names: parameter -> name.
            ranges: see `save`.

        Raises:
            CheckpointError: the checkpoint was saved with another optimizer, or has state of full parameters (row and
                column sums) for a parameter that is sharded here. Nothing is changed then.
        """
        classes = {part.optimizer_class for part in self.manifest.parts if part.optimizer_class}
        if not classes:
            raise CheckpointError(
                f"{self.path} has no optimizer state. Load only the model, or use another checkpoint."
            )
        ranges = ranges or {}
        load_optimizer_state(
            optimizer,
            names,
            optimizer_class=", ".join(sorted(classes)),
            options_of=lambda name: self._param_options.get(self._stored_name(name)),
            state_of=lambda name, read: self._optimizer_state_of(name, ranges.get(name), read=read),
        )

    def random(self, rank: int, size: int) -> RandomState | None:
        """The generator states of `rank`; None if the checkpoint has none, or was saved by another number of ranks."""
        if size != self.num_parts or (part := self.manifest.parts[rank]).random is None:
            return None
        return RandomState(
            {name: self._files.full(Piece(part.random, name, None)) for name in self._files.keys(part.random)},
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
        """The state of a parameter, or of a shard of it; without `read`, its tensors are on the meta device."""
        if part is not None and part.start == part.stop:
            return {}
        stored = self._stored_name(name)
        state: dict[str, Any] = {}
        for key, pieces in self._optimizer_tensors.get(stored, {}).items():
            label = f"optimizer state {key!r} of {name}"
            shape = self._files.shape(pieces)
            if part is None or self._is_sharded(key, shape, part):
                get = self._files.tensor if read else self._files.outline
                state[key] = get(f"{label} in {self.path}", pieces, part)
            elif math.prod(shape) == 1:  # the same for all shards
                state[key] = self._files.full(pieces[0])
            else:
                raise CheckpointError(
                    f"{label} has shape {shape} in {self.path} for the full parameter {part.shape} and cannot be "
                    "sharded. Resume with the saved layout, or with one that does not shard parameters."
                )
        return {**state, **self._optimizer_values.get(stored, {})}

    @staticmethod
    def _is_sharded(key: str, shape: tuple[int, ...], part: Range) -> bool:
        """Whether saved state of this shape is sharded like its parameter."""
        if shape == part.shape == ():
            return key != "step"  # a scalar parameter has scalar state
        return is_elementwise(shape, Range(0, math.prod(part.shape), part.shape))

    def _stored_name(self, name: str) -> str:
        return name if name in self._model else root_name(name, self.manifest.ties)

    def _pieces_of(self, name: str) -> list[Piece]:
        stored = self._stored_name(name)
        if stored not in self._model:
            raise CheckpointError(f"{self.path} has no tensor {name}. It was saved from a different model.")
        return self._model[stored]

    def _check_fits(self, name: str, tensor: Tensor, part: Range | None) -> None:
        pieces = self._pieces_of(name)
        if part is not None and tensor.numel() != part.stop - part.start:
            raise size_mismatch(name, tensor.numel(), part)
        if part is not None and not tensor.numel():
            return
        wanted = tuple(tensor.shape) if part is None else part.shape
        dtype = SAFETENSORS_TYPES.get(tensor.dtype, str(tensor.dtype))
        saved: list[tuple[str, Any, Any]] = [("shape", self._files.shape(pieces), wanted)]
        if saved[0][1] == wanted:
            saved += [("type", found, dtype) for found in self._files.types(f"{name} in {self.path}", pieces, part)]
        for attribute, old, new in saved:
            if old != new:
                raise CheckpointError(
                    f"{name} has {attribute} {old} in {self.path} and {new} in the model. Build the model with the "
                    "saved configuration."
                )
