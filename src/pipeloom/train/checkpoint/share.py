"""What one rank holds of a model and of the optimizer's state, whole or in pieces, and how it writes its share."""

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
from pipeloom.train.checkpoint.pieces import Writer, assign_writers, piece_key
from pipeloom.train.checkpoint.state import SAFETENSORS_TYPES, OptimizerState, RandomState, is_elementwise
from pipeloom.train.checkpoint.tensor_file import FileRecord, TensorSource, write_tensors


class Holding(NamedTuple):
    """What a rank has of one name, as the ranks tell each other.

    Attributes:
        part: which elements; None for all.
        states: keys of the optimizer's state that is a number for each of them.
    """

    part: Range | None
    states: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, row: list[Any]) -> Holding:
        part, states = row
        return cls(part and Range(part[0], part[1], tuple(part[2])), tuple(states))


class Owned(NamedTuple):
    """What a rank writes of one name: `part` of what it holds under `name`; if it `leads`, what no part has too."""

    name: str
    part: Range | None
    leads: bool


class Share:
    """The model and the optimizer of one rank.

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
                raise CheckpointError(
                    f"{name} has {model[name].numel()} elements here and the range {part.start} to {part.stop}: a "
                    "tensor has the elements of its range; give both of one layout"
                )

    def plan(self) -> dict[str, dict[str, Holding]]:
        """What there is, by name, as JSON can tell it."""
        groups = self._optimizer.groups if self._optimizer else []
        parameters = [name for group in groups for name in group["parameters"]]
        return {
            "model": {name: Holding(self._part(name)) for name in self._model},
            "optimizer": {name: Holding(self._part(name), self._elementwise(name)) for name in parameters},
        }

    def write(
        self,
        directory: Path,
        suffix: str,
        random: RandomState | None,
        model: Mapping[str, Owned],
        optimizer: Mapping[str, Owned],
    ) -> dict[str, Any]:
        """Write this rank's files into `directory`; `model` and `optimizer` say what, by the name it is stored under.

        Returns:
            JSON: {"part": `Part`, "files": records, "weights": names in the model's file, "bytes": of these}.
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
        """The keys of a parameter's state that are parts as the parameter is."""
        part, tensors = self._part(name), self._state_tensors(name)
        return () if part is None else tuple(k for k, t in tensors.items() if is_elementwise(t.shape, part))

    def _state_tensors(self, name: str) -> dict[str, Tensor]:
        return self._optimizer.tensors.get(name, {}) if self._optimizer else {}

    def _weight(self, stored: str, owned: Owned) -> tuple[str, TensorSource]:
        key = stored if owned.part is None else piece_key(stored, owned.part)
        return key, tensor_source(key, self._model[owned.name], self._saved_shape(owned.name))

    def _saved_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape in which the elements of a range are saved; None: as they are."""
        whole = self._ranges.get(name)
        return None if whole is None else whole.shape if whole.is_whole else (whole.stop - whole.start,)

    def _states(self, stored: str, owned: Owned) -> Iterator[tuple[str, TensorSource]]:
        elementwise, shape = self._elementwise(owned.name), self._saved_shape(owned.name)
        held = self._ranges.get(owned.name)
        for key, tensor in self._state_tensors(owned.name).items():
            if key in elementwise and owned.part is not None:
                name = f"{piece_key(stored, owned.part)}/{key}"
                yield name, tensor_source(name, tensor, shape)
            elif owned.leads:
                reshaped = shape if held is not None and is_elementwise(tensor.shape, held) else None
                yield f"{stored}/{key}", tensor_source(f"{stored}/{key}", tensor, reshaped)

    def _optimizer_content(self, optimizer: OptimizerState, owned: Mapping[str, Owned]) -> dict[str, Any]:
        """What the manifest says of the optimizer's state."""
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


def owned_by(rank: int, held: list[dict[str, Holding]], ties: Mapping[str, str]) -> dict[str, Owned]:
    """What `rank` has to write of all that the ranks hold, by the name it is stored under.

    Raises:
        CheckpointError: elements or states are missing, or held in parts that overlap; on every rank alike.
    """
    parts = [{name: holding.part for name, holding in holdings.items()} for holdings in held]
    owned: dict[str, Owned] = {}
    for stored, writers in assign_writers(parts, ties).items():
        _check_states(stored, list(writers.values()), held)
        first = min(writer.rank for writer in writers.values())
        for part, writer in writers.items():
            if writer.rank == rank:
                owned[stored] = Owned(writer.name, part, leads=rank == first)
    return owned


def _check_states(stored: str, writers: list[Writer], held: list[dict[str, Holding]]) -> None:
    """Ranks with pieces of one parameter have pieces of the same state."""
    first, *others = [(writer.rank, set(held[writer.rank][writer.name].states)) for writer in writers]
    for rank, keys in others:
        if differ := sorted(keys ^ first[1]):
            there, away = (rank, first[0]) if differ[0] in keys else (first[0], rank)
            raise CheckpointError(
                f"rank {there} has optimizer state {differ[0]!r} of its part of {stored}, rank {away} has none of "
                "its own: all parts of a parameter are updated together; step the optimizer on every rank"
            )


def tensor_source(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> TensorSource:
    """A tensor to be written, in another `shape` if one is given. Raises CheckpointError for what cannot be held."""
    dtype = SAFETENSORS_TYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.dtype}, {tensor.layout}, which safetensors cannot hold: convert it")

    def read() -> memoryview:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy().data)

    return TensorSource(dtype, tuple(tensor.shape) if shape is None else shape, read)
