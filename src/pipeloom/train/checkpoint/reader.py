"""Loads a checkpoint by parameter name into any layout. Nothing is unpickled."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.parallel.placed import PlacedBlock
from pipeloom.pretrained.files import SAFETENSORS_TYPES, is_huggingface_directory
from pipeloom.train.checkpoint.block_shards import BlockShard
from pipeloom.train.checkpoint.directory import is_ours, resolve
from pipeloom.train.checkpoint.huggingface import Directory, read_directory
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    read_manifest,
    read_weight_map,
    root_name,
)
from pipeloom.train.checkpoint.pieces import Piece, stored_model, stored_optimizer
from pipeloom.train.checkpoint.state import (
    OptimizerState,
    RandomState,
    check_elements,
    check_state,
    is_elementwise,
    like,
    name_of,
    unwrapped,
)
from pipeloom.train.checkpoint.tensor_reader import StoredTensors, TensorFiles


class Checkpoint:
    """A checkpoint that is open for reading, with methods that load tensors by name.

    Attributes:
        path: the directory.
        manifest: its content as read.
        step: the training step.
        state: the state of the trainer that was passed to `save`.
        layout: how the model was split, as passed to `save`.
        compute_type: the dtype of the model's computations, if these are main parameters of another dtype.
        num_parts: the number of ranks that wrote the checkpoint.
        on_tensor: called before each tensor that `load_model` and `load_optimizer` read.
    """

    def __init__(
        self,
        path: Path,
        *,
        verify_files: bool = True,
        of: Directory | None = None,
        key: CheckpointKey | None = None,
        opened: Mapping[str, StoredTensors] | None = None,
    ) -> None:
        self.path, self._directory = path, of
        self.manifest = manifest = read_manifest(path, key) if of is None else of.manifest
        self.step, self.state, self.layout = manifest.step, manifest.state, manifest.layout
        self.compute_type, self.num_parts = manifest.compute_type, len(manifest.parts)
        self.on_tensor: Callable[[], object] = lambda: None
        self._records = manifest.files if verify_files else {}
        self._files = TensorFiles(path, self._records, opened or {})

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name; a sharded tensor has an entry ``NAME[start:stop]`` per piece."""
        if self._directory is not None:
            return {name: pieces[0].file for name, pieces in self._directory.pieces.items()}
        return read_weight_map(self.path, self._records.get(INDEX_NAME))

    @property
    def names(self) -> list[str]:
        """The stored tensors of the model."""
        return list(self._model)

    def optimizer_state(
        self,
        names: Collection[str] | None = None,
        ranges: Mapping[str, Range] | None = None,
        *,
        blocks: Mapping[str, PlacedBlock] | None = None,
        read: bool = True,
    ) -> OptimizerState | None:
        """The optimizer state on the CPU; None if there is none.

        Args:
            names: the parameters of a rank; None: all. Those without saved state are left out.
            ranges, blocks: see `save`; other parameters are full.
            read: whether to read values; else state with one number per element is on the meta device.

        Raises:
            CheckpointError: state of a full parameter, such as row and column sums, for a parameter that is sharded.
        """
        classes = {part.optimizer_class for part in self.manifest.parts if part.optimizer_class}
        if not classes:
            return None
        groups: dict[str, dict[str, Any]] = {}  # shards of one group are in several parts
        for group in (group for part in self.manifest.parts for group in part.param_groups):
            known = groups.setdefault(repr(group["options"]), {"parameters": [], "options": group["options"]})
            known["parameters"] = list(dict.fromkeys([*known["parameters"], *group["parameters"]]))
        if names is not None:
            for group in groups.values():
                stored = set(group["parameters"])
                group["parameters"] = [name for name in names if self._stored_name(name) in stored]
        found, parts = OptimizerState(min(classes), groups=list(groups.values())), _parts(ranges, blocks)
        for name in (name for group in found.groups for name in group["parameters"]):
            for key, value in self._optimizer_state_of(name, parts.get(name), read=read).items():
                (found.tensors if isinstance(value, Tensor) else found.values).setdefault(name, {})[key] = value
        return found

    def tensor(self, name: str) -> Tensor:
        """A full tensor of the model by any of its names, on the CPU. Raises CheckpointError for an unknown name."""
        return self._files.tensor(name, self._pieces_of(name))

    def load_model(
        self,
        tensors: Mapping[str, Tensor],
        ranges: Mapping[str, Range] | None = None,
        *,
        blocks: Mapping[str, PlacedBlock] | None = None,
        all_names: Collection[str] | None = None,
    ) -> None:
        """Copy saved values into `tensors` in place. Reads only the elements needed, from any saved layout.

        Args:
            tensors: parameters and buffers of this rank by name: full tensors, or shards of the given `ranges`.
            ranges, blocks: see `save`.
            all_names: all names in the `state_dict()` of the full model; if given, a tensor that is only in the
                checkpoint is an error too.

        Raises:
            CheckpointError: a name, shape or dtype differs: no tensor is changed then. Or a file is damaged or cannot
                be read: each tensor is compared with its hashes before it is copied, and earlier ones have been copied
                then. Build the model anew.
        """
        if all_names is not None:
            known = {self._stored_name(name) for name in all_names}
            if extra := sorted(self._model.keys() - known):
                raise CheckpointError(
                    f"the model has no tensor {extra[0]} of {self.path}. It was saved from a different model."
                )
        parts = _parts(ranges, blocks)
        for name, tensor in tensors.items():
            self._check_fits(name, tensor, parts.get(name))
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.on_tensor()
                if tensor.numel() or name not in parts:
                    part, pieces = parts.get(name), self._pieces_of(name)
                    if isinstance(part, BlockShard):
                        loaded = self._files.shard(name, pieces, part)
                    else:
                        loaded = self._files.tensor(name, pieces, part)
                    tensor.copy_(loaded.reshape(tensor.shape))

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        ranges: Mapping[str, Range] | None = None,
        *,
        blocks: Mapping[str, PlacedBlock] | None = None,
    ) -> None:
        """Restore the state and hyperparameters of `optimizer`.

        State with one number per element is sharded like its parameter. Other state, such as a step count, is the same
        for all shards. A parameter without elements gets no state.

        Args:
            optimizer: the optimizer of this rank.
            names: parameter -> name.
            ranges, blocks: see `save`.

        Raises:
            CheckpointError: the checkpoint was saved with another optimizer, or has state of full parameters (row and
                column sums) for a parameter that is sharded here: nothing is changed then. Or a file is damaged or
                cannot be read, as for `load_model`.
        """
        optimizer, parts = unwrapped(optimizer), _parts(ranges, blocks)
        saved_class = ", ".join(sorted({part.optimizer_class for part in self.manifest.parts if part.optimizer_class}))
        if not saved_class:
            raise CheckpointError(
                f"{self.path} has no optimizer state. Load only the model, or use another checkpoint."
            )
        if type(optimizer).__qualname__ != saved_class:
            raise CheckpointError(
                f"the checkpoint was saved with {saved_class}, not {type(optimizer).__qualname__}. Resume with "
                f"{saved_class}."
            )
        groups = [(group, [(name_of(p, names), p) for p in group["params"]]) for group in optimizer.param_groups]
        saved_options = [self._group_options([name for name, _ in named]) for _, named in groups]
        for name, parameter in (pair for _, named in groups for pair in named):
            state = self._optimizer_state_of(name, parts.get(name), read=False)
            check_state(name, parameter, state, saved_class)
        for (group, named), options in zip(groups, saved_options, strict=True):
            on_device = bool(options.get("capturable") or options.get("fused"))
            for name, parameter in named:
                self.on_tensor()
                state = self._optimizer_state_of(name, parts.get(name), read=True)
                for key, value in state.items():
                    # torch keeps the step count on the CPU, except for capturable and fused optimizers.
                    if isinstance(value, Tensor) and (key != "step" or on_device):
                        state[key] = value.to(parameter.device)
                if state:
                    optimizer.state[parameter] = state
                else:  # the parameter never had a gradient
                    optimizer.state.pop(parameter, None)
            for key, value in options.items():
                group[key] = like(group.get(key), value)

    def random(self, rank: int, size: int) -> RandomState | None:
        """The generator states of `rank`; None if the checkpoint has none, or was saved by another number of ranks."""
        if size != self.num_parts or (part := self.manifest.parts[rank]).random is None:
            return None
        return RandomState(self._files.everything(part.random), part.random_values, str(self.path))

    @cached_property
    def _model(self) -> dict[str, list[Piece]]:
        return stored_model(self.manifest, self.weight_map) if self._directory is None else self._directory.pieces

    @cached_property
    def _optimizer(self) -> tuple[dict[str, dict[str, list[Piece]]], dict[str, dict[str, Any]]]:
        """The pieces and the other values of the optimizer state, by parameter and key."""
        values = {name: state for part in self.manifest.parts for name, state in part.optimizer_values.items()}
        return stored_optimizer(self.manifest), values

    def _group_options(self, names: list[str]) -> dict[str, Any]:
        """The saved options of the parameters of one group."""
        groups = [group for part in self.manifest.parts for group in part.param_groups]
        options_of = {name: group["options"] for group in groups for name in group["parameters"]}
        first: dict[str, Any] = {}
        for name in names:
            saved = options_of.get(self._stored_name(name))
            if saved is None:
                raise CheckpointError(
                    f"the checkpoint has no optimizer state of {name}: it was saved from a different model, or the "
                    "optimizer did not have this parameter. Load only the model, or use a checkpoint with the same "
                    "trainable parameters."
                )
            first = first or saved
            if saved != first:
                differ = next(key for key in saved.keys() | first.keys() if saved.get(key) != first.get(key))
                raise CheckpointError(
                    f"{names[0]} and {name} are in one param group but were saved with different {differ}. Use the "
                    "param groups of the saved optimizer."
                )
        return first

    def _optimizer_state_of(self, name: str, part: Range | BlockShard | None, *, read: bool) -> dict[str, Any]:
        """The state of a parameter, or of a shard of it; without `read`, its tensors are on the meta device."""
        if part is not None and not part.num_elements:
            return {}
        (tensors, values), stored = self._optimizer, self._stored_name(name)
        state: dict[str, Any] = {}
        for key, pieces in tensors.get(stored, {}).items():
            label = f"optimizer state {key!r} of {name}"
            shape = self._files.shape(pieces)
            if part is None or self._is_sharded(key, shape, part):
                if isinstance(part, BlockShard):
                    state[key] = self._files.shard(label, pieces, part, read=read).view(part.local_shape)
                else:
                    state[key] = self._files.tensor(label, pieces, part, read=read)
            elif math.prod(shape) == 1:  # the same for all shards
                state[key] = self._files.full(pieces[0])
            else:
                raise CheckpointError(
                    f"{label} has shape {shape} in {self.path} for the full parameter {part.shape} and cannot be "
                    "sharded. Resume with the saved layout, or with one that does not shard parameters."
                )
        return {**state, **values.get(stored, {})}

    @staticmethod
    def _is_sharded(key: str, shape: tuple[int, ...], part: Range | BlockShard) -> bool:
        """Whether saved state of this shape is sharded like its parameter."""
        if shape == part.shape == ():
            return key != "step"  # a scalar parameter has scalar state
        return is_elementwise(shape, Range(0, math.prod(part.shape), part.shape))

    def _stored_name(self, name: str) -> str:
        return name if name in self._model else root_name(name, self.manifest.ties)

    def _pieces_of(self, name: str) -> list[Piece]:
        stored = self._stored_name(name)
        if self._directory is not None and name in self._directory.made:
            raise CheckpointError(f"{self.path} has {name} in several parts. Load it with pipeloom.from_pretrained.")
        if stored not in self._model:
            raise CheckpointError(f"{self.path} has no tensor {name}. It was saved from a different model.")
        return self._model[stored]

    def _check_fits(self, name: str, tensor: Tensor, part: Range | BlockShard | None) -> None:
        pieces = self._pieces_of(name)
        if isinstance(part, Range):
            check_elements(name, tensor, part)
        if part is not None and not tensor.numel():
            return
        wanted = tuple(tensor.shape) if part is None else part.shape
        dtype = SAFETENSORS_TYPES.get(tensor.dtype, str(tensor.dtype))
        saved: list[tuple[str, Any, Any]] = [("shape", self._files.shape(pieces), wanted)]
        if saved[0][1] == wanted:
            wanted_parts = part.boxes(owned_only=False) if isinstance(part, BlockShard) else [part]
            saved += [
                ("type", found, dtype) for each in wanted_parts for found in self._files.types(name, pieces, each)
            ]
        for attribute, old, new in saved:
            if old != new:
                raise CheckpointError(
                    f"{name} has {attribute} {old} in {self.path} and {new} in the model. Build the model with the "
                    "saved configuration."
                )


def _parts(
    ranges: Mapping[str, Range] | None, blocks: Mapping[str, PlacedBlock] | None
) -> dict[str, Range | BlockShard]:
    """What this rank holds of each tensor that it does not hold in full."""
    spans = ranges or {}
    return {**spans, **{name: BlockShard(block, spans.get(name)) for name, block in (blocks or {}).items()}}


def load(path: Path, *, verify_files: bool = True, key: CheckpointKey | None = None) -> Checkpoint:
    """Open a checkpoint, or the latest one in an output directory. Tensors are read lazily.

    Args:
        path: the checkpoint, the output directory, or a Hugging Face directory, which has a model alone: of step 0, by
            the names of its tensors in the model.
        verify_files: whether to compare what is read with its hashes, in memory, before it is used.
        key: that the checkpoint must be signed with; None: signatures are not read.

    Raises:
        CheckpointError: the directory is missing, damaged, not signed with the key, not a checkpoint, or of an
            unsupported version.
    """
    path = Path(path)
    if is_huggingface_directory(path) and not is_ours(path):
        if key is not None:
            raise CheckpointError(
                f"{path} is a Hugging Face directory, which has no signature, and checkpoint_key_file={key.path} "
                "asks for one. Remove checkpoint_key_file if you trust it."
            )
        return Checkpoint(path, of=read_directory(path))
    return Checkpoint(resolve(path), verify_files=verify_files, key=key)
