"""The files of one rank: which tensors and shards of the model and optimizer state it holds, and which it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import Part
from pipeloom.train.checkpoint.pieces import Writer, assign_writers, piece_key, size_mismatch
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, OptimizerState, RandomState, is_elementwise
from pipeloom.train.checkpoint.tensor_file import FileRecord, TensorSource, write_tensors


class HeldTensor(NamedTuple):
    """What a rank holds of a tensor; the ranks exchange it as JSON.

    Attributes:
        part: the range of elements; None for the full tensor.
        states: keys of the optimizer state with one number per element.
    """

    part: Range | None
    states: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, row: list[Any]) -> HeldTensor:
        part, states = row
        return cls(part and Range(part[0], part[1], tuple(part[2])), tuple(states))


class WrittenTensor(NamedTuple):
    """What a rank writes of a tensor.

    Attributes:
        name: its name on this rank.
        part: the range of elements; None for the full tensor.
        leads: whether the rank also writes the optimizer state that is the same for all shards.
    """

    name: str
    part: Range | None
    leads: bool


class RankFiles:
    """Writes the model and the optimizer state of one rank.

    Args:
        model, optimizer, ranges: see `save`.

    Raises:
        CheckpointError: a tensor has another number of elements than its range.
    """

    def __init__(
        self, model: Mapping[str, Tensor], optimizer: OptimizerState | None, ranges: Mapping[str, Range]
    ) -> None:
        self._model, self._optimizer, self._ranges = model, optimizer, ranges
        for name, part in ranges.items():
            if name in model and model[name].numel() != part.stop - part.start:
                raise size_mismatch(name, model[name].numel(), part)

    def held(self) -> dict[str, dict[str, HeldTensor]]:
        """What this rank holds of the model and of the optimizer state, by name."""
        groups = self._optimizer.groups if self._optimizer else []
        parameters = [name for group in groups for name in group["parameters"]]
        return {
            "model": {name: HeldTensor(self._part(name)) for name in self._model},
            "optimizer": {name: HeldTensor(self._part(name), self._elementwise(name)) for name in parameters},
        }

    def write(
        self,
        directory: Path,
        suffix: str,
        random: RandomState | None,
        model: Mapping[str, WrittenTensor],
        optimizer: Mapping[str, WrittenTensor],
    ) -> dict[str, Any]:
        """Write the files of this rank.

        Args:
            directory: the directory of the checkpoint.
            suffix: the end of the file names.
            random: the generator states of this rank.
            model, optimizer: stored name -> what to write.

        Returns:
            JSON: {"part": `Part`, "files": records, "weights": names in the model file, "bytes": their size}.
        """
        files: dict[str, FileRecord] = {}

        def write(kind: str, tensors: dict[str, TensorSource]) -> str:
            files[kind + suffix] = write_tensors(directory / (kind + suffix), tensors)
            return kind + suffix

        weights = dict(self._weight(stored, owned) for stored, owned in model.items())
        pieces = {
            stored: owned.part
            for kind in (model, optimizer)
            for stored, owned in kind.items()
            if owned.part is not None
        }
        content: dict[str, Any] = {"model": write("model", weights), "pieces": pieces}
        if self._optimizer is not None:
            states = dict(source for stored, owned in optimizer.items() for source in self._states(stored, owned))
            content |= {"optimizer": write("optimizer", states), **self._optimizer_content(self._optimizer, optimizer)}
        if random is not None:
            states = {name: tensor_source(name, tensor) for name, tensor in random.tensors.items()}
            content |= {"random": write("random", states), "random_values": random.values}
        return {
            "part": asdict(Part(**content)),
            "files": {name: asdict(record) for name, record in files.items()},
            "weights": list(weights),
            "bytes": sum(source.size_bytes for source in weights.values()),
        }

    def _part(self, name: str) -> Range | None:
        part = self._ranges.get(name)
        return None if part is None or part.is_whole else part

    def _elementwise(self, name: str) -> tuple[str, ...]:
        """The keys of a parameter's state that are sharded like the parameter."""
        part, tensors = self._part(name), self._state_tensors(name)
        return () if part is None else tuple(k for k, t in tensors.items() if is_elementwise(t.shape, part))

    def _state_tensors(self, name: str) -> dict[str, Tensor]:
        return self._optimizer.tensors.get(name, {}) if self._optimizer else {}

    def _weight(self, stored: str, owned: WrittenTensor) -> tuple[str, TensorSource]:
        key = stored if owned.part is None else piece_key(stored, owned.part)
        return key, tensor_source(key, self._model[owned.name], self._saved_shape(owned.name))

    def _saved_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in which a shard is saved; None for the shape of the tensor."""
        whole = self._ranges.get(name)
        return None if whole is None else whole.shape if whole.is_whole else (whole.stop - whole.start,)

    def _states(self, stored: str, owned: WrittenTensor) -> Iterator[tuple[str, TensorSource]]:
        elementwise, shape = self._elementwise(owned.name), self._saved_shape(owned.name)
        held = self._ranges.get(owned.name)
        for key, tensor in self._state_tensors(owned.name).items():
            if key in elementwise and owned.part is not None:
                name = f"{piece_key(stored, owned.part)}/{key}"
                yield name, tensor_source(name, tensor, shape)
            elif owned.leads:
                reshaped = shape if held is not None and is_elementwise(tensor.shape, held) else None
                yield f"{stored}/{key}", tensor_source(f"{stored}/{key}", tensor, reshaped)

    def _optimizer_content(self, optimizer: OptimizerState, owned: Mapping[str, WrittenTensor]) -> dict[str, Any]:
        """The entries of the manifest about the optimizer state."""
        leading = {own.name: stored for stored, own in owned.items() if own.leads}
        pieces = {stored: self._elementwise(own.name) for stored, own in owned.items()}
        tensors = {
            stored: [key for key in self._state_tensors(name) if key not in pieces[stored]]
            for name, stored in leading.items()
        }
        return {
            "optimizer_class": optimizer.optimizer_class,
            "optimizer_tensors": {name: keys for name, keys in tensors.items() if keys},
            "optimizer_pieces": {name: list(keys) for name, keys in pieces.items() if keys},
            "optimizer_values": {
                stored: optimizer.values[name] for name, stored in leading.items() if name in optimizer.values
            },
            "param_groups": [
                {**group, "parameters": [leading[name] for name in group["parameters"] if name in leading]}
                for group in optimizer.groups
            ],
        }


def written_by(rank: int, held: list[dict[str, HeldTensor]], ties: Mapping[str, str]) -> dict[str, WrittenTensor]:
    """Stored name -> what `rank` writes, given what each rank holds.

    Raises:
        CheckpointError: elements or states are missing, or ranges overlap partially; the same error on every rank.
    """
    parts = [{name: tensor.part for name, tensor in tensors.items()} for tensors in held]
    owned: dict[str, WrittenTensor] = {}
    for stored, writers in assign_writers(parts, ties).items():
        _check_states(stored, list(writers.values()), held)
        first = min(writer.rank for writer in writers.values())
        for part, writer in writers.items():
            if writer.rank == rank:
                owned[stored] = WrittenTensor(writer.name, part, leads=rank == first)
    return owned


def _check_states(stored: str, writers: list[Writer], held: list[dict[str, HeldTensor]]) -> None:
    """Check that all shards of a parameter have the same state."""
    first, *others = [(writer.rank, set(held[writer.rank][writer.name].states)) for writer in writers]
    for rank, keys in others:
        if differ := sorted(keys ^ first[1]):
            present, absent = (rank, first[0]) if differ[0] in keys else (first[0], rank)
            raise CheckpointError(
                f"rank {present} has optimizer state {differ[0]!r} for its shard of {stored}, but rank {absent} has "
                "none. Step the optimizer on every rank."
            )


def tensor_source(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> TensorSource:
    """A tensor to write, in another `shape` if given. Raises CheckpointError for unsupported tensors."""
    dtype = SAFETENSORS_TYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, {tensor.layout}, which safetensors does not support. Convert it."
        )

    def read() -> memoryview:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy().data)

    return TensorSource(dtype, tuple(tensor.shape) if shape is None else shape, read)
