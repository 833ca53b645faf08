"""Which saved tensor is in which file: every process computes the same."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.common.tensor_file import size_bytes
from pipeloom.pretrained.files import SAFETENSORS_TYPES, SINGLE_NAME
from pipeloom.pretrained.reversal import Saved


class File(NamedTuple):
    """A file of tensors: its name, and safetensors types and shapes by name."""

    name: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def size_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(size_bytes(*form) for form in self.tensors.values())


def in_files(groups: Sequence[Sequence[Saved]], max_bytes: int) -> list[list[File]]:
    """The files of each process: its tensors in order, in files of at most `max_bytes` or of one tensor.

    Args:
        groups: by process, what it saves.
        max_bytes: of the tensors of a file.
    """
    packed = [_packed(own, max_bytes) for own in groups]
    total, number = sum(map(len, packed)), 0
    files: list[list[File]] = []
    for own in packed:
        files.append([])
        for tensors in own:
            number += 1
            name = SINGLE_NAME if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            files[-1].append(File(name, tensors))
    return files


def _packed(own: Sequence[Saved], max_bytes: int) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    packed: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    held = 0
    for name, (shape, dtype) in (item for saved in own for item in saved.forms.items()):
        form = SAFETENSORS_TYPES[dtype], shape
        if not packed or held + size_bytes(*form) > max_bytes:
            packed.append({})
            held = 0
        packed[-1][name] = form
        held += size_bytes(*form)
    return packed


def index_text(files: Sequence[File]) -> str:
    """The index of several files, as transformers reads it."""
    weight_map = {name: file.name for file in files for name in file.tensors}
    metadata = {"total_size": sum(file.size_bytes for file in files)}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
