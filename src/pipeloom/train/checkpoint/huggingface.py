"""Checkpoints and Hugging Face directories: writes the model of a checkpoint as one, and reads one as a checkpoint."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.common.atomic_directory import partial_directory, put_in_place
from pipeloom.common.atomic_file import write_whole
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.tensor_file import TensorSource, TensorWriter
from pipeloom.errors import CheckpointError, InputError
from pipeloom.pretrained.files import CONFIG_NAME, INDEX_NAME, TORCH_TYPES, tensor_source
from pipeloom.pretrained.layout import in_files, index_text
from pipeloom.pretrained.loading import describe, empty_model
from pipeloom.pretrained.saving import saved_by, write_configuration
from pipeloom.train.checkpoint.convert import balanced, check_new, model_tensors
from pipeloom.train.checkpoint.manifest import Manifest, Part, read_manifest, verify_file
from pipeloom.train.checkpoint.pieces import Piece

_COPIED = (".json", ".model", ".txt", ".jinja")  # suffixes of a tokenizer's files


class Directory(NamedTuple):
    """A Hugging Face directory as a checkpoint.

    Attributes:
        manifest: of one part per file.
        pieces: where each tensor of the model is.
        made: tensors of the model that are made of others in the files.
    """

    manifest: Manifest
    pieces: dict[str, list[Piece]]
    made: frozenset[str]


def read_directory(path: Path) -> Directory:
    """Find the tensors of a Hugging Face directory by their names in the model.

    Raises:
        InputError: the directory has no model that transformers knows. CheckpointError: files are damaged.
    """
    model, conversions, stored = describe(path)
    pieces = {
        name: [Piece(stored[key].path.name, key, None)]
        for name, conversion in conversions.of.items()
        if conversion.converter is None
        for _, key in conversion.parts[:1]
    }
    ties: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        if target in conversions.missing and source in pieces:
            ties[target] = source
        elif source in conversions.missing and target in pieces:
            ties[source] = target
    parts = tuple(Part(model=file) for file in dict.fromkeys(each.path.name for each in stored.values()))
    manifest = Manifest(step=0, layout={}, state={}, files={}, ties=ties, parts=parts)
    return Directory(manifest, pieces, frozenset(conversions.of.keys() - pieces.keys()))


def convert_to_directory(
    checkpoint: Path, out: Path, config: Path, num_files: int = 1, key: CheckpointKey | None = None
) -> list[Path]:
    """Write the model of a checkpoint as a new directory that transformers reads, one tensor in memory at a time.

    Args:
        checkpoint: of a model of transformers.
        out: new.
        config: the model's config.json, or a directory with it, whose tokenizer is copied.
        num_files: of tensors.
        key: that the checkpoint must be signed with.

    Returns:
        The paths of the written files.

    Raises:
        InputError: `out` is not empty or cannot be written, or `config` makes no model.
        CheckpointError: the checkpoint is damaged, or was saved from a different model.
    """
    home = config.parent if config.name == CONFIG_NAME else config
    model = empty_model(home)
    tensors = {name: tensor.source for name, tensor in model_tensors(checkpoint, key=key).items()}
    check_new(out)
    ties = read_manifest(checkpoint, key).ties
    _check_fits(checkpoint, model, tensors, ties)
    groups = saved_by(model, ties, [{name: [list(each.shape), each.dtype] for name, each in tensors.items()}])[0]
    if not 1 <= num_files <= max(1, len(groups)):
        raise InputError(f"--ranks={num_files}: must be from 1 to {len(groups)}, the number of tensors.")
    sizes = {str(index): sum(tensors[name].size_bytes for name in each.names) for index, each in enumerate(groups)}
    chunks = [[groups[int(index)] for index in chunk] for chunk in balanced(sizes, num_files)]
    files = [file for own in in_files(chunks, sum(sizes.values()) + 1) for file in own]
    with _told(out), partial_directory(out) as partial:
        for file, chunk in zip(files, chunks, strict=True):
            writer = TensorWriter(partial / file.name, file.tensors)
            for saved in chunk:
                made = saved.make({name: _tensor(tensors[name]) for name in saved.names})
                for name, value in made.items():
                    writer.write(name, tensor_source(name, value).read())
            writer.close()
        if num_files > 1:
            write_whole(partial / INDEX_NAME, index_text(files))
        _copy_others(home, checkpoint, partial, key)
        write_configuration(model, partial, {kind for file in files for kind, _ in file.tensors.values()})
        put_in_place(partial, out, replaces=False)
    return sorted(out.iterdir())


@contextmanager
def _told(out: Path) -> Iterator[None]:
    """Raises InputError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}). Choose another directory.") from error


def _tensor(source: TensorSource) -> Tensor:
    data = bytearray(source.read())
    if not data:
        return torch.empty(source.shape, dtype=TORCH_TYPES[source.dtype])
    return torch.frombuffer(data, dtype=TORCH_TYPES[source.dtype]).view(source.shape)


def _check_fits(checkpoint: Path, model: Any, tensors: Mapping[str, TensorSource], ties: Mapping[str, str]) -> None:
    """Raises CheckpointError where the checkpoint does not have exactly the tensors of the model."""
    own = model.state_dict(keep_vars=True)
    shown = {id(own[name]): name for name in own if name in tensors}
    for name, tensor in own.items():
        stored = shown.get(id(tensor), ties.get(name, name))
        if stored not in tensors:
            raise CheckpointError(
                f"{checkpoint} has no tensor {name} of {type(model).__name__}. Pass its own --config."
            )
        if tensors[stored].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(tensors[stored].shape)} in {checkpoint} and {list(tensor.shape)} in "
                f"{type(model).__name__}. Pass its own --config."
            )
    extra = next((name for name in tensors if name not in own), None)
    if extra is not None:
        raise CheckpointError(f"{type(model).__name__} has no tensor {extra} of {checkpoint}. Pass its own --config.")


def _copy_others(home: Path, checkpoint: Path, partial: Path, key: CheckpointKey | None) -> None:
    """Copy the tokenizer's files that lie with the configuration; of a checkpoint, those that belong to it."""
    manifest = read_manifest(checkpoint, key)
    written = {name for part in manifest.parts for name in (part.model, part.optimizer, part.random)} | {INDEX_NAME}
    inside = os.path.samefile(home, checkpoint)
    for path in sorted(home.iterdir()):
        wanted = path.name in manifest.files.keys() - written if inside else path.suffix in _COPIED
        if not wanted or not path.is_file() or path.name.endswith(".index.json"):
            continue
        if inside:
            verify_file(checkpoint, path.name, manifest.files[path.name])
        shutil.copyfile(path, partial / path.name)
