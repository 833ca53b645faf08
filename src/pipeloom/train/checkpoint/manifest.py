"""The checkpoint format. `manifest.json` has the size and SHA-256 of every other file; `manifest.json.sha256` has the
hash of the manifest and is written last.

    checkpoint-500/
      model-00001-of-00002.safetensors       parameters and buffers by name, or pieces of them; one file per rank
      model.safetensors.index.json           name -> file, in the format of Hugging Face
      optimizer-00001-of-00002.safetensors   NAME/exp_avg, NAME[0:96]/exp_avg, NAME/step, ...
      random-00001-of-00002.safetensors      generator states of the rank
      manifest.json, manifest.json.sha256
      manifest.json.hmac-sha256              with a key: see `pipeloom.common.checkpoint_key`

A rank may hold the elements start..stop of a flattened parameter. It writes this shard as a one-dimensional tensor
``NAME[start:stop]``, called a piece here; a shard with all elements is written as a tensor ``NAME`` of full shape. Of a
parameter that the ranks of a stage share, a rank may hold a block: it writes it, or its shard of it, as rectangles
``NAME[start:stop,start:stop]`` of the full tensor (version 3).

The manifest also has a hash of each block of 4 MiB of longer files: a process compares the blocks that it reads, in
memory, before it uses them. Earlier releases pass over these hashes.

Reading and verification need no torch, so a damaged checkpoint is reported before a slow start.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import parse_json
from pipeloom.common.recorded_file import FileRecord, RecordedFile, is_file_name
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, folded, shortened
from pipeloom.train.checkpoint.boxes import Box

FORMAT = "pipeloom-checkpoint"
VERSION = 3
READABLE = (1, 2, 3)  # version 1 has no pieces, version 2 no blocks
_WITHOUT_BLOCKS = 2  # written where no rank holds a block, which earlier releases read
MANIFEST_NAME = "manifest.json"
SEAL_NAME = "manifest.json.sha256"
INDEX_NAME = "model.safetensors.index.json"
NAME = re.compile(r"checkpoint-(\d+)")  # of a complete checkpoint: its step


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank wrote: file names, and the state that is not in tensors."""

    model: str
    pieces: dict[str, Range] = field(default_factory=dict)  # name of a sharded tensor -> the range in this file
    optimizer: str | None = None
    random: str | None = None
    optimizer_class: str | None = None
    optimizer_tensors: dict[str, list[str]] = field(default_factory=dict)  # parameter -> keys in the optimizer file
    optimizer_pieces: dict[str, list[str]] = field(default_factory=dict)  # the same, for keys stored as pieces
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state other than tensors
    blocks: dict[str, list[Box]] = field(default_factory=dict)  # name of a tensor -> the rectangles in this file
    optimizer_blocks: dict[str, list[Box]] = field(default_factory=dict)  # the same, of the optimizer file
    block_states: dict[str, list[str]] = field(default_factory=dict)  # parameter -> keys stored for each of them
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # {"parameters": [...], "options": {...}}
    random_values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        pieces = {name: Range.from_json(row) for name, row in data.get("pieces", {}).items()}
        blocks = {
            kind: {name: list(map(Box.from_json, rows)) for name, rows in data.get(kind, {}).items()}
            for kind in ("blocks", "optimizer_blocks")
        }
        part = cls(**{**data, "pieces": pieces, **blocks})
        check_fields(part, error=CheckpointError)
        if part.optimizer_blocks.keys() != part.block_states.keys():
            raise ValueError("optimizer_blocks and block_states name different parameters")
        if not part.optimizer_pieces.keys() <= part.pieces.keys():
            raise ValueError("optimizer_pieces names a parameter without a range")
        for group in part.param_groups:
            names, options = group.get("parameters"), group.get("options")
            if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
                raise ValueError("a param group has no list of parameters")
            if not isinstance(options, dict):
                raise ValueError("a param group has no options")
        return part

    @property
    def has_blocks(self) -> bool:
        """Whether the part needs version 3."""
        return bool(self.blocks or self.optimizer_blocks)

    def to_dict(self) -> dict[str, Any]:
        """JSON; without the entries of version 3 where they are empty."""
        row = {each.name: getattr(self, each.name) for each in fields(self)}
        if not self.has_blocks:
            for key in ("blocks", "optimizer_blocks", "block_states"):
                del row[key]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        step: the training step.
        layout: JSON of the trainer: how the model was split.
        state: JSON of the trainer: what it needs to resume.
        files: size and hash by file name.
        ties: alias of a tied parameter -> the name that it is stored under.
        parts: what each rank wrote.
        compute_type: the dtype of the model's computations, if the checkpoint has main parameters of another dtype.
    """

    step: int
    layout: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileRecord]
    ties: dict[str, str]
    parts: tuple[Part, ...]
    compute_type: str | None = None

    def to_bytes(self) -> bytes:
        version = VERSION if any(part.has_blocks for part in self.parts) else _WITHOUT_BLOCKS
        parts = [part.to_dict() for part in self.parts]
        files = {name: record.to_dict() for name, record in self.files.items()}
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return json_bytes({"format": FORMAT, "version": version, **own, "files": files, "parts": parts})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        files = {name: FileRecord.from_dict(row) for name, row in data["files"].items()}
        if wrong := next((name for name in files if not is_file_name(name)), None):
            raise ValueError(f"{folded(wrong)} is not the name of a file")
        parts = tuple(Part.from_dict(part) for part in data["parts"])
        for name in [file for part in parts for file in (part.model, part.optimizer, part.random) if file is not None]:
            if name not in files:
                raise ValueError(f"{folded(name)} of a part is missing in files")
        manifest = cls(
            step=int(data["step"]),
            layout=dict(data["layout"]),
            state=dict(data["state"]),
            files=files,
            ties=dict(data["ties"]),
            parts=parts,
            compute_type=data.get("compute_type"),
        )
        check_fields(manifest, error=CheckpointError)
        for name in manifest.ties:
            root_name(name, manifest.ties)
        return manifest


def json_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def seal(manifest: bytes) -> bytes:
    """The content of `manifest.json.sha256`, in the format of `sha256sum -c`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_NAME}\n".encode()


def read_manifest(checkpoint: Path, key: CheckpointKey | None = None) -> Manifest:
    """Read the manifest and compare it with its hash; if there is a key, also with its signature and its name.

    Raises:
        CheckpointError: it is missing, damaged, not signed with the key, or of an unsupported version, or a signed
            checkpoint has the name of another step; the message has the file.
    """
    if leads_nowhere(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is a link to {folded(os.readlink(checkpoint))}, which is not there. Make that directory "
            "available again, or remove the link."
        )
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not a directory. Pass a checkpoint-N directory that pipeloom wrote.")
    if not (checkpoint / MANIFEST_NAME).is_file() and not (checkpoint / SEAL_NAME).is_file():
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST_NAME}. Pass a checkpoint-N directory that pipeloom wrote."
        )
    text = _read(checkpoint / MANIFEST_NAME)
    if _read(checkpoint / SEAL_NAME) != seal(text):
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is damaged: its hash differs from {SEAL_NAME}. Use another checkpoint."
        )
    if key is not None:
        key.check(checkpoint, text)
    try:
        data = parse_json(text)
        found = (data["format"], data["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        found = (None, None)
    if found[0] != FORMAT:
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is not a manifest of pipeloom: format is {folded(found[0])}, must be "
            f"{FORMAT!r}. Pass a checkpoint-N directory that pipeloom wrote."
        )
    if found[1] not in READABLE:
        raise CheckpointError(
            f"{checkpoint} has format version {folded(found[1])}, but this release reads {READABLE[0]} to "
            f"{READABLE[-1]}. Use the release of pipeloom that wrote it."
        )
    try:
        manifest = Manifest.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, CheckpointError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else shortened(str(error), 200)
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is not a valid manifest ({reason}). Use another checkpoint, see `pipeloom "
            "checkpoint ls`."
        ) from error
    if key is not None and is_misnamed(checkpoint, manifest.step):
        raise CheckpointError(
            f"{checkpoint} is signed as the checkpoint of step {manifest.step}. Rename it to "
            f"checkpoint-{manifest.step}, or use another checkpoint."
        )
    return manifest


def leads_nowhere(path: Path) -> bool:
    """Whether a path is a symbolic link to what does not exist."""
    return path.is_symlink() and not path.exists()


def is_misnamed(checkpoint: Path, step: int) -> bool:
    """Whether the name of a checkpoint of `step` has another step."""
    match = NAME.fullmatch(checkpoint.absolute().name)
    return match is not None and int(match[1]) != step


def root_name(name: str, ties: Mapping[str, str]) -> str:
    """The name that a parameter is stored under, after all ties. Raises CheckpointError if they lead in a circle."""
    for _ in range(len(ties) + 1):
        if name not in ties:
            return name
        name = ties[name]
    raise CheckpointError(f"the ties of {folded(name)} lead in a circle. Use another checkpoint.")


def verify_file(checkpoint: Path, name: str, record: FileRecord) -> None:
    """Compare the size and hash of a file with its record.

    Raises:
        CheckpointError: they differ, or the file cannot be read; the message has the file.
    """
    path = checkpoint / name
    try:
        size = path.stat().st_size  # fast, so compare it before the hash
        if size != record.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes instead of {record.bytes}. Use another checkpoint."
            )
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest != record.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest. Use another checkpoint.")


def missing_or_cut(checkpoint: Path, manifest: Manifest) -> str | None:
    """The first file that is missing or has another size than its record; a fast check of a checkpoint."""
    for name, record in manifest.files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != record.bytes:
            return name
    return None


def verify(checkpoint: Path, key: CheckpointKey | None = None) -> Manifest:
    """Compare size and SHA-256 of every file with the manifest, and its signature if there is a key.

    Raises:
        CheckpointError: the first mismatch.
    """
    manifest = read_manifest(checkpoint, key)
    for name, record in manifest.files.items():
        verify_file(checkpoint, name, record)
    return manifest


def read_weight_map(checkpoint: Path, record: FileRecord | None) -> dict[str, str]:
    """Tensor name -> file name, from the index.

    Args:
        checkpoint: the directory.
        record: with which the index is compared; None: nothing is.

    Raises:
        CheckpointError: the index is damaged or cannot be read.
    """
    path = checkpoint / INDEX_NAME
    try:
        text = path.read_bytes() if record is None else RecordedFile(path, record).read(0, record.bytes)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        found = dict(parse_json(text)["weight_map"])
    except (ValueError, KeyError, TypeError):
        found = {"": None}
    if not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise CheckpointError(f"{path} is not an index of safetensors files. Use another checkpoint.")
    return found


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise CheckpointError(f"{path} is no regular file. Use another checkpoint.")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror}). Check the file, or use another checkpoint.")
