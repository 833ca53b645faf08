"""The files of one rank: which tensors and shards of the model and optimizer state it holds, and which it writes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeloom.common.recorded_file import FileRecord
from pipeloom.common.tensor_file import TensorSource, write_tensors
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.parallel.placed import PlacedBlock
from pipeloom.pretrained.files import tensor_source
from pipeloom.train.checkpoint.block_shards import BlockShard
from pipeloom.train.checkpoint.manifest import Part
from pipeloom.train.checkpoint.pieces import piece_key
from pipeloom.train.checkpoint.state import (
    OptimizerState,
    RandomState,
    check_elements,
    is_elementwise,
)
from pipeloom.train.checkpoint.written import HeldTensor, WrittenTensor


class RankFiles:
    """Writes the model and the optimizer state of one rank; the arguments are those of `save`."""

    def __init__(
        self,
        model: Mapping[str, Tensor],
        optimizer: OptimizerState | None,
        ranges: Mapping[str, Range],
        blocks: Mapping[str, PlacedBlock],
    ) -> None:
        self._model, self._optimizer, self._ranges = model, optimizer, ranges
        self._blocks = {name: BlockShard(block, ranges.get(name)) for name, block in blocks.items()}
        self._shards = {name: part for name, part in ranges.items() if not part.is_whole and name not in blocks}
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
            "model": {name: self._held(name) for name in self._model},
            "optimizer": {name: self._held(name)._replace(states=self._elementwise(name)) for name in parameters},
        }

    def _held(self, name: str) -> HeldTensor:
        block = self._blocks.get(name)
        boxes = None if block is None else tuple(block.boxes(owned_only=True))
        return HeldTensor(self._shards.get(name), boxes=boxes)

    def write(
        self,
        directory: Path,
        rank_and_size: tuple[int, int],
        random: RandomState | None,
        model: Mapping[str, WrittenTensor],
        optimizer: Mapping[str, WrittenTensor],
        on_tensor: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Write the files of this rank.

        Args:
            directory: the directory of the checkpoint.
            rank_and_size: this rank, and the number of ranks.
            random: the generator states of this rank.
            model, optimizer: stored name -> what to write.
            on_tensor: called before each tensor.

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

        def write(name: str, tensors: dict[str, TensorSource]) -> None:
            files[name] = write_tensors(directory / name, tensors, on_tensor)

        found = self.hand_out(write, rank_and_size, random, model, optimizer)
        return {**found, "files": {name: record.to_dict() for name, record in files.items()}}

    def hand_out(
        self,
        take: Callable[[str, dict[str, TensorSource]], None],
        rank_and_size: tuple[int, int],
        random: RandomState | None,
        model: Mapping[str, WrittenTensor],
        optimizer: Mapping[str, WrittenTensor],
    ) -> dict[str, Any]:
        """Give the name and the tensors of each file of this rank to `take`; else as `write`, without "files"."""
        rank, size = rank_and_size
        suffix = f"-{rank + 1:05d}-of-{size:05d}.safetensors"

        def write(kind: str, tensors: dict[str, TensorSource]) -> str:
            take(kind + suffix, tensors)
            return kind + suffix

        weights: dict[str, TensorSource] = {}
        for stored, owned in model.items():
            for box in owned.boxes:
                key = piece_key(stored, box)
                weights[key] = tensor_source(key, self._blocks[owned.name].view(self._model[owned.name], box))
            if owned.boxes:
                continue
            key = stored if owned.part is None else piece_key(stored, owned.part)
            weights[key] = tensor_source(key, self._model[owned.name], self._saved_shape(owned.name))
        owners = [*model.items(), *optimizer.items()]
        content: dict[str, Any] = {
            "model": write("model", weights),
            "pieces": {stored: owned.part for stored, owned in owners if owned.part is not None},
            "blocks": {stored: list(owned.boxes) for stored, owned in model.items() if owned.boxes},
        }
        if self._optimizer is not None:
            states = dict(source for stored, owned in optimizer.items() for source in self._sources(stored, owned))
            content |= {"optimizer": write("optimizer", states), **self._optimizer_content(self._optimizer, optimizer)}
        if random is not None:
            states = {name: tensor_source(name, tensor) for name, tensor in random.tensors.items()}
            content |= {"random": write("random", states), "random_values": random.values}
        return {
            "part": Part(**content).to_dict(),
            "weights": list(weights),
            "bytes": sum(source.size_bytes for source in weights.values()),
        }

    def _elementwise(self, name: str) -> tuple[str, ...]:
        """The keys of a parameter's state that are sharded like the parameter."""
        part, block, tensors = self._shards.get(name), self._blocks.get(name), self._states.get(name, {})
        if block is not None:
            part = Range(0, block.num_elements, ())
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
            if key in elementwise and owned.boxes:
                for box in owned.boxes:
                    name = f"{piece_key(stored, box)}/{key}"
                    yield name, tensor_source(name, self._blocks[owned.name].view(tensor, box))
            elif key in elementwise and owned.part is not None:
                name = f"{piece_key(stored, owned.part)}/{key}"
                yield name, tensor_source(name, tensor, shape)
            elif owned.leads:
                reshaped = shape if held is not None and is_elementwise(tensor.shape, held) else None
                yield f"{stored}/{key}", tensor_source(f"{stored}/{key}", tensor, reshaped)

    def _optimizer_content(self, optimizer: OptimizerState, owned: Mapping[str, WrittenTensor]) -> dict[str, Any]:
        """The entries of the manifest about the optimizer state."""
        leading = {own.name: stored for stored, own in owned.items() if own.leads}
        pieces = {stored: self._elementwise(own.name) for stored, own in owned.items()}
        in_blocks = {stored for stored, own in owned.items() if own.boxes and pieces[stored]}
        tensors = {
            stored: [key for key in self._states.get(name, {}) if key not in pieces[stored]]
            for name, stored in leading.items()
        }
        return {
            "optimizer_class": optimizer.optimizer_class,
            "optimizer_tensors": {name: keys for name, keys in tensors.items() if keys},
            "optimizer_pieces": {n: list(keys) for n, keys in pieces.items() if keys and n not in in_blocks},
            "optimizer_blocks": {stored: list(owned[stored].boxes) for stored in owned if stored in in_blocks},
            "block_states": {stored: list(pieces[stored]) for stored in owned if stored in in_blocks},
            "optimizer_values": {
                stored: optimizer.values[name] for name, stored in leading.items() if name in optimizer.values
            },
            "param_groups": [
                {**group, "parameters": [leading[name] for name in group["parameters"] if name in leading]}
                for group in optimizer.groups
            ],
        }
