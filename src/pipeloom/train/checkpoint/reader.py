"""Reading a checkpoint, by name, into whatever layout the reader has. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.directory import resolve
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    Manifest,
    read_manifest,
    read_weight_map,
    root_name,
    verify_file,
)
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, RandomState, load_optimizer_state


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
        """Tensor name -> file name."""
        self._check(INDEX_NAME)
        return read_weight_map(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor of the model, on the CPU, by any of its names. Raises CheckpointError if there is none."""
        stored = self._stored_tensor(name)
        return self._read(self.weight_map[stored], stored)

    def load_model(self, tensors: Mapping[str, Tensor], *, all_names: Collection[str] | None = None) -> None:
        """Copy saved values into `tensors` (this rank's parameters and buffers, by name), in place.

        `all_names`: every name of the whole model's `state_dict()`; with it, a tensor that only the checkpoint has is
        an error too. Raises CheckpointError naming the tensor, before any is changed, if name, shape or dtype differ.
        """
        if all_names is not None:
            known = {self._stored_name(name) for name in all_names}
            if extra := sorted(self.weight_map.keys() - known):
                raise CheckpointError(f"{self.path} has {extra[0]}, the model has not: it is of another model")
        for name, tensor in tensors.items():
            self._check_fits(name, tensor)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.tensor(name))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Restore the state and hyperparameters of `optimizer`; `names` gives each of its parameters its name.

        Raises CheckpointError, before anything is changed, when the checkpoint was not saved with this optimizer.
        """
        classes = {part.optimizer_class for part in self.manifest.parts if part.optimizer_class}
        if not classes:
            raise CheckpointError(f"{self.path} has no optimizer state: load the model only, or use another checkpoint")
        load_optimizer_state(
            optimizer,
            names,
            optimizer_class=", ".join(sorted(classes)),
            options_of=lambda name: self._param_options.get(self._stored_name(name)),
            state_of=self._optimizer_state_of,
        )

    def random(self, rank: int, size: int) -> RandomState | None:
        """The generator states of `rank`; None when the checkpoint was saved by another number of ranks, or without."""
        if size != self.num_parts or (part := self.manifest.parts[rank]).random is None:
            return None
        return RandomState(
            {name: self._read(part.random, name) for name in self._keys(part.random)}, part.random_values
        )

    @cached_property
    def _param_options(self) -> dict[str, dict[str, Any]]:
        groups = [group for part in self.manifest.parts for group in part.param_groups]
        return {name: group["options"] for group in groups for name in group["parameters"]}

    def _optimizer_state_of(self, name: str) -> dict[str, Any]:
        stored = self._stored_name(name)
        for part in self.manifest.parts:
            keys, values = part.optimizer_tensors.get(stored), part.optimizer_values.get(stored)
            if keys is not None or values is not None:
                tensors = {key: self._read(part.optimizer or "", f"{stored}/{key}") for key in keys or []}
                return {**tensors, **(values or {})}
        return {}

    def _stored_name(self, name: str) -> str:
        return name if name in self.weight_map else root_name(name, self.manifest.ties)

    def _stored_tensor(self, name: str) -> str:
        stored = self._stored_name(name)
        if stored not in self.weight_map:
            raise CheckpointError(f"{self.path} has no tensor {name}: it is of another model")
        return stored

    def _check_fits(self, name: str, tensor: Tensor) -> None:
        stored = self._stored_tensor(name)
        entry = self._file(self.weight_map[stored]).get_slice(stored)
        saved = (tuple(entry.get_shape()), entry.get_dtype())
        wanted = (tuple(tensor.shape), SAFETENSORS_TYPES.get(tensor.dtype, str(tensor.dtype)))
        for what, old, new in zip(("shape", "type"), saved, wanted, strict=True):
            if old != new:
                raise CheckpointError(
                    f"{name} has {what} {old} in {self.path} and {new} in the model: they must be equal; "
                    f"build the model as it was when it was saved"
                )

    def _read(self, file: str, name: str) -> Tensor:
        try:
            # The library's tensors are views of a mapped file; a clone is aligned and outlives the checkpoint.
            tensor: Tensor = self._file(file).get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file} cannot be read ({error}): use another checkpoint") from error
        return tensor

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
