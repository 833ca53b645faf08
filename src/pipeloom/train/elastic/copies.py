"""The copies of all ranks in memory as one checkpoint, from which ranks of any other layout load their state."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.common.tensor_file import TensorSource
from pipeloom.pretrained.files import TORCH_TYPES
from pipeloom.train.checkpoint.huggingface import Directory
from pipeloom.train.checkpoint.manifest import Manifest, Part
from pipeloom.train.checkpoint.pieces import stored_model
from pipeloom.train.checkpoint.rank_files import RankFiles
from pipeloom.train.checkpoint.reader import Checkpoint
from pipeloom.train.checkpoint.tensor_reader import StoredTensors
from pipeloom.train.checkpoint.writer import merged_ties, to_write
from pipeloom.train.elastic.held_parts import read_parts
from pipeloom.train.recovery.state_copies import StateCopy


def as_checkpoint(copies: Sequence[StateCopy]) -> Checkpoint:
    """A checkpoint whose files are in memory.

    Args:
        copies: of all ranks of a run, in their order, made after the same step. Their memory is read, not copied.

    Returns:
        What `checkpoint.load` would return, if these ranks had saved after that step.
    """
    parts = [read_parts(copy.parts) for copy in copies]
    ranks = [
        RankFiles(copy.model, copy.optimizer, part.ranges, part.blocks)
        for copy, part in zip(copies, parts, strict=True)
    ]
    held = [{**rank.held(), "ties": part.ties} for rank, part in zip(ranks, parts, strict=True)]
    ties = merged_ties(held)
    models, optimizers = to_write(held, ties)
    files: dict[str, StoredTensors] = {}

    def take(name: str, tensors: dict[str, TensorSource]) -> None:
        files[name] = _TensorsInMemory(tensors)

    answers = [
        rank.hand_out(take, (number, len(ranks)), copy.random(number, len(ranks)), models[number], optimizers[number])
        for number, (rank, copy) in enumerate(zip(ranks, copies, strict=True))
    ]
    first = copies[0]
    manifest = Manifest(
        step=first.step,
        layout=first.layout,
        state=first.state,
        files={},
        ties=ties,
        parts=tuple(Part.from_dict(answer["part"]) for answer in answers),
        compute_type=parts[0].compute_type,
    )
    weight_map = {name: answer["part"]["model"] for answer in answers for name in answer["weights"]}
    directory = Directory(manifest, stored_model(manifest, weight_map), frozenset())
    return Checkpoint(Path(f"memory-of-step-{first.step}"), verify_files=False, of=directory, opened=files)


class _TensorsInMemory:
    """Tensors by name, with the interface of `safetensors.safe_open`."""

    def __init__(self, sources: dict[str, TensorSource]) -> None:
        self._sources = sources

    def keys(self) -> Iterable[str]:
        return self._sources

    def get_slice(self, name: str) -> Any:
        return _SlicesInMemory(self._sources[name])

    def get_tensor(self, name: str) -> Tensor:
        return _SlicesInMemory(self._sources[name]).tensor


class _SlicesInMemory:
    """A tensor in memory, of which parts are read."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def tensor(self) -> Tensor:
        kind, source = TORCH_TYPES[self._source.dtype], self._source
        if not source.size_bytes:
            return torch.empty(source.shape, dtype=kind)
        return torch.frombuffer(source.read(), dtype=kind).view(source.shape)

    def get_shape(self) -> list[int]:
        return list(self._source.shape)

    def get_dtype(self) -> str:
        return self._source.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.tensor[index]
