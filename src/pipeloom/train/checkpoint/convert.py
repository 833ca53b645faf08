"""Converts the model of a checkpoint to Hugging Face safetensors files, with identical values. Needs no torch."""

import errno
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeloom.common.atomic_directory import partial_directory, put_in_place
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.tensor_file import TensorSource, tensor_sources, write_bytes, write_tensors
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, InputError, either, folded
from pipeloom.train.checkpoint.boxes import Box, cover_box
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    json_bytes,
    read_manifest,
    read_weight_map,
)
from pipeloom.train.checkpoint.pieces import Piece, cover, stored_model
from pipeloom.train.fine_tuning.adapter_files import write_adapters


class ModelTensor(NamedTuple):
    """A full tensor of the model, and the pieces that it is stored as."""

    source: TensorSource
    pieces: list[Piece]


def model_tensors(
    checkpoint: Path, *, verify_files: bool = True, key: CheckpointKey | None = None
) -> dict[str, ModelTensor]:
    """All tensors of the model by name, in stage order.

    Raises:
        CheckpointError: a file is missing or, with `verify_files`, damaged, or elements of a tensor are missing.
    """
    manifest = read_manifest(checkpoint, key)
    files = [part.model for part in manifest.parts]
    records = manifest.files if verify_files else {}
    try:
        sources = {file: tensor_sources(checkpoint / file, records.get(file)) for file in files}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read ({error.strerror}). Check the file, or use another checkpoint."
        ) from error
    return {
        name: ModelTensor(_joined(name, pieces, sources), pieces)
        for name, pieces in stored_model(manifest, read_weight_map(checkpoint, records.get(INDEX_NAME))).items()
    }


def _joined(name: str, pieces: list[Piece], sources: dict[str, dict[str, TensorSource]]) -> TensorSource:
    """The full tensor from its pieces."""
    first = pieces[0]
    if first.range is None:
        return _source(first, sources)
    shape = first.range.shape
    if isinstance(first.range, Box):
        return _joined_boxes(name, [(piece.range, piece) for piece in pieces if isinstance(piece.range, Box)], sources)
    ordered = cover(
        name, [(piece.range, piece) for piece in pieces if isinstance(piece.range, Range)], 0, math.prod(shape)
    )
    parts = _alike(name, first.file, [_source(piece, sources) for piece, _, _ in ordered])
    return TensorSource(parts[0].dtype, shape, lambda: b"".join(part.read() for part in parts))


def _source(piece: Piece, sources: dict[str, dict[str, TensorSource]]) -> TensorSource:
    """The tensor of a piece. Raises CheckpointError if the file has none of its size."""
    found = sources[piece.file].get(piece.key)
    if found is None or (piece.range is not None and math.prod(found.shape) != piece.range.num_elements):
        raise CheckpointError(
            f"{piece.file} has no tensor {folded(piece.key)} of the size in the manifest. Use another checkpoint."
        )
    return found


def _alike(name: str, file: str, parts: list[TensorSource]) -> list[TensorSource]:
    """`parts`. Raises CheckpointError if they have different types."""
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1:
        found = either(sorted(kinds))
        raise CheckpointError(f"{file}: the pieces of {folded(name)} are {found}. Use another checkpoint.")
    return parts


def _joined_boxes(
    name: str, pieces: list[tuple[Box, Piece]], sources: dict[str, dict[str, TensorSource]]
) -> TensorSource:
    """The full tensor from rectangles of it."""
    shape = pieces[0][0].shape
    parts = []
    for piece, box, _ in cover_box(name, pieces, Box.full(shape)):
        source = _source(piece, sources)
        if source.shape != box.extents:
            raise CheckpointError(
                f"{piece.key} has shape {source.shape}, not that of its block {box.extents}: the file does not fit the "
                "manifest. Use another checkpoint."
            )
        parts.append((box, source))
    _alike(name, pieces[0][1].file, [source for _, source in parts])
    dtype, item_bytes = parts[0][1].dtype, parts[0][1].size_bytes // parts[0][0].num_elements

    def read() -> bytes:
        joined = np.empty((*shape, item_bytes), dtype=np.uint8)
        for box, source in parts:
            joined[box.slices_in()] = np.frombuffer(source.read(), dtype=np.uint8).reshape(*box.extents, item_bytes)
        return joined.tobytes()

    return TensorSource(dtype, shape, read)


def convert(checkpoint: Path, out: Path, num_files: int = 1, key: CheckpointKey | None = None) -> list[Path]:
    """Write the model of a checkpoint as `num_files` safetensors files with an index, to a new directory `out`.

    A single file is named `model.safetensors`. Several files hold consecutive layers, with about the same number of
    bytes per file. `out` is created atomically. Adapters are written as peft does.

    Returns:
        The paths of the written files.

    Raises:
        InputError: `out` is not empty or cannot be written, or `num_files` is out of range.
        CheckpointError: the checkpoint is damaged, or not signed with the key.
    """
    tensors = {name: tensor.source for name, tensor in model_tensors(checkpoint, key=key).items()}
    adapters = _model_state(checkpoint, key).get("adapters")
    if adapters is not None and num_files > 1:
        raise InputError(f"--ranks={num_files}: adapters are one file, as peft reads it. Remove it.")
    if not 1 <= num_files <= max(1, len(tensors)):
        raise InputError(f"--ranks={num_files}: must be from 1 to {len(tensors)}, the number of tensors.")
    check_new(out)
    groups = balanced({name: source.size_bytes for name, source in tensors.items()}, num_files)
    try:
        with partial_directory(out) as partial:
            if adapters is None:
                _write_weights(partial, tensors, groups)
            else:
                write_adapters(partial, adapters, tensors)
            put_in_place(partial, out, replaces=False)
    except OSError as error:
        source = Path(error.filename or out)
        if source.is_relative_to(checkpoint):
            raise InputError(f"{source} cannot be read ({error.strerror}). Check the file.") from error
        fix = "Free disk space" if error.errno == errno.ENOSPC else "Check its permissions"
        raise InputError(f"{out} cannot be written ({error.strerror}). {fix}, or choose another directory.") from error
    return sorted(out.iterdir())


def _write_weights(directory: Path, tensors: dict[str, TensorSource], groups: list[list[str]]) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(directory / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    total = sum(source.size_bytes for source in tensors.values())
    write_bytes(directory / INDEX_NAME, json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map}))


def check_new(out: Path) -> None:
    """Raises InputError if a directory to write has files already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty directory. Choose another name.")


def has_configuration(checkpoint: Path, key: CheckpointKey | None = None) -> Path | None:
    """Where the config.json of a checkpoint's model is: in the checkpoint, or in the directory that was fine-tuned."""
    if "config.json" in read_manifest(checkpoint, key).files:
        return checkpoint
    model = _model_state(checkpoint, key)
    home = model.get("pretrained")
    if home is None or model.get("adapters") is not None or not (Path(home) / "config.json").is_file():
        return None
    return Path(home)


def _model_state(checkpoint: Path, key: CheckpointKey | None) -> dict[str, Any]:
    """What `pipeloom train` says about the model of a checkpoint."""
    state = read_manifest(checkpoint, key).state.get("model")
    return state if isinstance(state, dict) else {}


def balanced(sizes_bytes: dict[str, int], num_groups: int) -> list[list[str]]:
    """Consecutive names in `num_groups` non-empty groups of about equal size."""
    names = list(sizes_bytes)
    groups: list[list[str]] = []
    left_bytes, start = sum(sizes_bytes.values()), 0
    for groups_left in range(num_groups, 0, -1):
        share, taken, end = left_bytes / groups_left, 0, start
        last = len(names) - (groups_left - 1)  # leave a name for each later group
        while end < last and (end == start or groups_left == 1 or taken + sizes_bytes[names[end]] / 2 <= share):
            taken += sizes_bytes[names[end]]
            end += 1
        groups.append(names[start:end])
        left_bytes, start = left_bytes - taken, end
    return groups
