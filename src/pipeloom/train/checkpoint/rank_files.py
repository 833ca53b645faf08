"""The files of one rank: which tensors and shards of the model and optimizer state it holds, and which it writes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import Part, piece_key, root_name
from pipeloom.train.checkpoint.state import (
    SAFETENSORS_TYPES,
    OptimizerState,
    RandomState,
    check_elements,
    is_elementwise,
)
from pipeloom.train.checkpoint.tensor_file import FileRecord, TensorSource, write_tensors


class HeldTensor(NamedTuple):
    """What a rank holds of a tensor; the ranks exchange it as JSON."""

    part: Range | None  # the range of elements; None for the full tensor
    states: tuple[str, ...] = ()  # keys of the optimizer state with one number per element

    @classmethod
    def from_json(cls, row: list[Any]) -> Self:
        part, states = row
        return cls(part and Range(part[0], part[1], tuple(part[2])), tuple(states))


class WrittenTensor(NamedTuple):
    """What a rank writes of a tensor."""

    name: str  # on this rank
    part: Range | None  # the range of elements; None for the full tensor
    leads: bool  # whether the rank also writes the optimizer state that is the same for all shards


class RankFiles:
    """Writes the model and the optimizer state of one rank; the arguments are those of `save`."""

    def __init__(
        self, model: Mapping[str, Tensor], optimizer: OptimizerState | None, ranges: Mapping[str, Range]
    ) -> None:
        self._model, self._optimizer, self._ranges = model, optimizer, ranges
        self._shards = {name: part for name, part in ranges.items() if not part.is_whole}
        self._states = optimizer.tensors if optimizer else {}

    def held(self) -> dict[str, dict[str, HeldTensor]]:
        """What this rank holds of the model and of the optimizer state, by name.

        Raises:
            CheckpointError: a tensor has another number of elements than its range.
        """
        for name, part in self._ranges.items():
            if name in self._model:
                check_elements(name, self._model[name], part)
        groups = self._optimizer.groups if self._optimizer else []
        parameters = [name for group in groups for name in group["parameters"]]
        return {
            "model": {name: HeldTensor(self._shards.get(name)) for name in self._model},
            "optimizer": {name: HeldTensor(self._shards.get(name), self._elementwise(name)) for name in parameters},
        }

    def write(
        self,
        directory: Path,
        rank_and_size: tuple[int, int],
        random: RandomState | None,
        model: Mapping[str, WrittenTensor],
        optimizer: Mapping[str, WrittenTensor],
    ) -> dict[str, Any]:
        """Write the files of this rank.

        Args:
            directory: the directory of the checkpoint.
            rank_and_size: this rank, and the number of ranks.
            random: the generator states of this rank.
            model, optimizer: stored name -> what to write.

        Returns:
            JSON: {"part": `Part`, "files": records, "weights": names in the model file, "bytes": their size}.

        Raises:
            CheckpointError: the directory does not exist on this rank, or safetensors does not support a tensor.
        """
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} does not exist: output_dir must be on a file system that all ranks share."
            )
        files: dict[str, FileRecord] = {}
        rank, size = rank_and_size
        suffix = f"-{rank + 1:05d}-of-{size:05d}.safetensors"

        def write(kind: str, tensors: dict[str, TensorSource]) -> str:
            files[kind + suffix] = write_tensors(directory / (kind + suffix), tensors)
            return kind + suffix

        weights: dict[str, TensorSource] = {}
        for stored, owned in model.items():
            key = stored if owned.part is None else piece_key(stored, owned.part)
            weights[key] = tensor_source(key, self._model[owned.name], self._saved_shape(owned.name))
        owners = [*model.items(), *optimizer.items()]
        content: dict[str, Any] = {
            "model": write("model", weights),
            "pieces": {stored: owned.part for stored, owned in owners if owned.part is not None},
        }
        if self._optimizer is not None:
            states = dict(source for stored, owned in optimizer.items() for source in self._sources(stored, owned))
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

    def _elementwise(self, name: str) -> tuple[str, ...]:
        """The keys of a parameter's state that are sharded like the parameter."""
        part, tensors = self._shards.get(name), self._states.get(name, {})
        return () if part is None else tuple(k for k, t in tensors.items() if is_elementwise(t.shape, part))

    def _saved_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in which a shard is saved; None for the shape of the tensor."""
        part = self._ranges.get(name)
        return None if part is None else part.shape if part.is_whole else (part.stop - part.start,)

    def _sources(self, stored: str, owned: WrittenTensor) -> Iterator[tuple[str, TensorSource]]:
        """The state of a parameter to write, by key in the file."""
        elementwise, shape = self._elementwise(owned.name), self._saved_shape(owned.name)
        held = self._ranges.get(owned.name)
        for key, tensor in self._states.get(owned.name, {}).items():
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
            stored: [key for key in self._states.get(name, {}) if key not in pieces[stored]]
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
    """Stored name -> what `rank` writes. Each element is written once, by the lowest rank that holds its range.

    Args:
        rank: the rank that writes.
        held: what each rank holds, by name.
        ties: alias of a tied tensor -> the name that it is stored under.

    Raises:
        CheckpointError: elements or states are missing, or ranges overlap partially; the same error on every rank.
    """
    owned: dict[str, WrittenTensor] = {}
    for stored, writers in _writers(held, ties).items():
        states = [(each, set(held[each][name].states)) for each, name in writers.values()]
        for other, keys in states[1:]:
            first, wanted = states[0]
            if differ := sorted(keys ^ wanted):
                present, absent = (other, first) if differ[0] in keys else (first, other)
                raise CheckpointError(
                    f"rank {present} has optimizer state {differ[0]!r} for its shard of {stored}, but rank {absent} "
                    "has none. Step the optimizer on every rank."
                )
        leader = min(each for each, _ in writers.values())
        for part, (writer, name) in writers.items():
            if writer == rank:
                owned[stored] = WrittenTensor(name, part, leads=rank == leader)
    return owned


def _writers(
    held: list[dict[str, HeldTensor]], ties: Mapping[str, str]
) -> dict[str, dict[Range | None, tuple[int, str]]]:
    """Stored name -> range -> the lowest rank that holds it, and its name there. Empty ranges are left out."""
    found: dict[str, dict[Range | None, tuple[int, str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, tensors in enumerate(held):
        for name, (part, _) in tensors.items():
            stored = root_name(name, ties)
            writers = found.setdefault(stored, {})
            if part is not None and shapes.setdefault(stored, part.shape) != part.shape:
                raise CheckpointError(
                    f"{name} has shape {part.shape} on rank {rank} and {shapes[stored]} on another. Build the same "
                    "model on all ranks."
                )
            if part is None or part.start < part.stop:
                writers.setdefault(part, (rank, name))
    for stored, writers in found.items():
        if len(writers) > 1 or None not in writers:
            _check_each_once(stored, writers, shapes[stored])
    keys = {piece_key(name, part) for name, parts in found.items() for part in parts if part is not None}
    if collision := sorted(keys & found.keys()):
        raise CheckpointError(
            f"tensor {collision[0]!r}: checkpoints store shards of other tensors under names that end in [start:stop], "
            f"and {collision[0].rpartition('[')[0]!r} has a shard of this name. Rename the parameter or buffer."
        )
    return found


def _check_each_once(name: str, writers: Mapping[Range | None, tuple[int, str]], shape: tuple[int, ...]) -> None:
    total, end, before = math.prod(shape), 0, -1
    spans = sorted((0, total, rank) if part is None else (*part[:2], rank) for part, (rank, _) in writers.items())
    for start, stop, rank in [*spans, (total, total, -1)]:
        if stop > total:
            raise CheckpointError(
                f"the range of {name} {shape} on rank {rank} ends at {stop}: the tensor has {total} elements. Correct "
                "the range."
            )
        if start > end:
            raise CheckpointError(
                f"elements {end} to {start} of {name} {shape} are on no rank: together the ranks must hold all. Save "
                "from all ranks, with the ranges of their layout."
            )
        if start < end:
            raise CheckpointError(
                f"elements {start} to {min(end, stop)} of {name} {shape} are in different ranges on ranks {before} and "
                f"{rank}: ranges must be equal or disjoint. Pass the ranges of the layout."
            )
        end, before = stop, rank


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
