"""The checkpoint format. `manifest.json` has the size and SHA-256 of every other file; `manifest.json.sha256` has the
hash of the manifest and is written last.

    checkpoint-500/
      model-00001-of-00002.safetensors       parameters and buffers by name, or pieces of them; one file per rank
      model.safetensors.index.json           name -> file, in the format of Hugging Face
      optimizer-00001-of-00002.safetensors   NAME/exp_avg, NAME[0:96]/exp_avg, NAME/step, ...
      random-00001-of-00002.safetensors      generator states of the rank
      manifest.json, manifest.json.sha256

A rank may hold the elements start..stop of a flattened parameter. It writes this shard as a one-dimensional tensor
``NAME[start:stop]``, called a piece here; a shard with all elements is written as a tensor ``NAME`` of full shape.

Reading and verification need no torch, so a damaged checkpoint is reported before a slow start.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from pipeloom.common.field_types import check_fields
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, folded
from pipeloom.train.checkpoint.tensor_file import FileRecord

FORMAT = "pipeloom-checkpoint"
VERSION = 2
READABLE = (1, 2)  # version 1 has no pieces
MANIFEST_NAME = "manifest.json"
SEAL_NAME = "manifest.json.sha256"
INDEX_NAME = "model.safetensors.index.json"


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
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # {"parameters": [...], "options": {...}}
    random_values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        pieces = {
            name: Range(int(start), int(stop), tuple(map(int, shape)))
            for name, (start, stop, shape) in data.get("pieces", {}).items()
        }
        part = cls(**{**data, "pieces": pieces})
        check_fields(part, error=CheckpointError)
        return part


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
        return json_bytes({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        files = {name: FileRecord(int(row["bytes"]), str(row["sha256"])) for name, row in data["files"].items()}
        if any(Path(name).name != name for name in files):  # never read outside of the directory
            raise ValueError("a file name has a directory")
        parts = tuple(Part.from_dict(part) for part in data["parts"])
        for name in [file for part in parts for file in (part.model, part.optimizer, part.random) if file is not None]:
            if name not in files:
                raise ValueError(f"{name} of a part is missing in files")
        return cls(
            step=int(data["step"]),
            layout=dict(data["layout"]),
            state=dict(data["state"]),
            files=files,
            ties=dict(data["ties"]),
            parts=parts,
            compute_type=data.get("compute_type"),
        )


def json_bytes(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def seal(manifest: bytes) -> bytes:
    """The content of `manifest.json.sha256`, in the format of `sha256sum -c`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_NAME}\n".encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest and compare it with its hash.

    Raises:
        CheckpointError: it is missing, damaged, or of an unsupported version; the message has the file.
    """
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
    try:
        data = json.loads(text)
        found = (data["format"], data["version"])
    except (ValueError, KeyError, TypeError):
        found = (None, None)
    if found[0] != FORMAT:
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is not a manifest of pipeloom: format is {folded(found[0])}, must be "
            f"{FORMAT!r}. Pass a checkpoint-N directory that pipeloom wrote."
        )
    if found[1] not in READABLE:
        raise CheckpointError(
            f"{checkpoint} has format version {found[1]}, but this release reads {READABLE[0]} to {READABLE[-1]}. Use "
            "the release of pipeloom that wrote it."
        )
    try:
        return Manifest.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is not a valid manifest ({reason}). Use another checkpoint, see `pipeloom "
            "checkpoint ls`."
        ) from error


def root_name(name: str, ties: Mapping[str, str]) -> str:
    """The name that a parameter is stored under, after all ties."""
    while name in ties:
        name = ties[name]
    return name


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


def verify(checkpoint: Path) -> Manifest:
    """Compare size and SHA-256 of every file with the manifest. Raises CheckpointError for the first mismatch."""
    manifest = read_manifest(checkpoint)
    for name, record in manifest.files.items():
        verify_file(checkpoint, name, record)
    return manifest


def read_weight_map(checkpoint: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index. The caller verifies the index first."""
    return dict(json.loads(_read(checkpoint / INDEX_NAME))["weight_map"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror}). Check the file, or use another checkpoint.")


# Pieces of sharded tensors


class Piece(NamedTuple):
    """A tensor in a file. `range` is None for a full tensor, whose shape is in the file."""

    file: str
    key: str
    range: Range | None


def piece_key(name: str, part: Range) -> str:
    """The name of a piece in its file."""
    return f"{name}[{part.start}:{part.stop}]"


def stored_model(manifest: Manifest, weight_map: Mapping[str, str]) -> dict[str, list[Piece]]:
    """The pieces of each tensor of the model by name, in the order of the index."""
    names = {piece_key(name, part): (name, part) for row in manifest.parts for name, part in row.pieces.items()}
    files = {part.model for part in manifest.parts}
    found: dict[str, list[Piece]] = {}
    for key, file in weight_map.items():
        if file not in files:  # only these are in the manifest, with a hash and without a path
            raise CheckpointError(f"the index has {key} in {file}, which has no model tensors. Use another checkpoint.")
        name, part = names.get(key, (key, None))
        found.setdefault(name, []).append(Piece(file, key, part))
    return found


def stored_optimizer(manifest: Manifest) -> dict[str, dict[str, list[Piece]]]:
    """The pieces of the optimizer state by parameter and key; parameters without tensors are left out."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for row in manifest.parts:
        file = row.optimizer or ""
        for name, keys in row.optimizer_tensors.items():
            for key in keys:
                found.setdefault(name, {}).setdefault(key, [Piece(file, f"{name}/{key}", None)])
        for name, keys in row.optimizer_pieces.items():
            part = row.pieces[name]
            for key in keys:
                piece = Piece(file, f"{piece_key(name, part)}/{key}", part)
                found.setdefault(name, {}).setdefault(key, []).append(piece)
    return found


def cover(name: str, pieces: Iterable[tuple[Range, Piece]], start: int, stop: int) -> list[tuple[Piece, int, int]]:
    """The pieces with elements `start` to `stop`, in order, each with the range needed, relative to the piece.

    Raises:
        CheckpointError: an element is in no piece or in several.
    """
    found: list[tuple[Piece, int, int]] = []
    end = start
    for part, piece in sorted(pieces):
        if part.stop <= start or part.start >= stop:
            continue
        if max(part.start, start) != end:
            break
        found.append((piece, end - part.start, min(part.stop, stop) - part.start))
        end = min(part.stop, stop)
    if end != stop:
        raise CheckpointError(
            f"the elements of {name} from {end} are missing or duplicated in the checkpoint. Use another checkpoint."
        )
    return found
