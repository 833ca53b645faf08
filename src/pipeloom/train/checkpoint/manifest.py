"""What makes a directory a checkpoint: `manifest.json`, which holds the size and SHA-256 of every other file, and
`manifest.json.sha256`, which holds the manifest's own and is written last.

    checkpoint-500/
      model-00001-of-00002.safetensors       parameters and buffers by name, or pieces of them; one file a rank
      model.safetensors.index.json           name -> file, as Hugging Face writes it
      optimizer-00001-of-00002.safetensors   NAME/exp_avg, NAME[0:96]/exp_avg, NAME/step, ...
      random-00001-of-00002.safetensors      generator states of the rank
      manifest.json, manifest.json.sha256

Reading and verifying need no torch, so a bad checkpoint is refused before anything slow is started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeloom.common.field_types import check_fields
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.tensor_file import FileRecord

FORMAT = "pipeloom-checkpoint"
VERSION = 2
READABLE = (1, 2)  # 1 had no pieces
MANIFEST_NAME = "manifest.json"
SEAL_NAME = "manifest.json.sha256"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank wrote."""

    model: str  # file names
    pieces: dict[str, Range] = field(default_factory=dict)  # of what it wrote in pieces: elements of which shape
    optimizer: str | None = None
    random: str | None = None
    optimizer_class: str | None = None
    optimizer_tensors: dict[str, list[str]] = field(default_factory=dict)  # parameter -> keys in the optimizer file
    optimizer_pieces: dict[str, list[str]] = field(default_factory=dict)  # the same, for keys it has a piece of
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state that is no tensor
    param_groups: list[dict[str, Any]] = field(default_factory=list)  # {"parameters": [...], "options": {...}}
    random_values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Part:
        pieces = {
            name: Range(int(start), int(stop), tuple(map(int, shape)))
            for name, (start, stop, shape) in data.get("pieces", {}).items()
        }
        part = cls(**{**data, "pieces": pieces})
        check_fields(part, error=CheckpointError)
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint as data. `layout` and `state` are the trainer's own JSON; `ties` maps each further name of a
    tied parameter to the name it is stored under; `compute_type` names the type in which the model computes where the
    parameters here are masters in another type, which the optimizer updates."""

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
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        files = {name: FileRecord(int(row["bytes"]), str(row["sha256"])) for name, row in data["files"].items()}
        if any(Path(name).name != name for name in files):  # never read outside of the directory
            raise ValueError("a file name is a path")
        parts = tuple(Part.from_dict(part) for part in data["parts"])
        for name in [file for part in parts for file in (part.model, part.optimizer, part.random) if file is not None]:
            if name not in files:
                raise ValueError(f"a part has {name}, which is not among the files")
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
    """The one legal content of `manifest.json.sha256`, as `sha256sum -c` reads it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST_NAME}\n".encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest, checked against its own hash. Raises CheckpointError, one line, naming the file."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not a directory: give a checkpoint-N directory that pipeloom wrote")
    if not (checkpoint / MANIFEST_NAME).is_file() and not (checkpoint / SEAL_NAME).is_file():
        raise CheckpointError(f"{checkpoint} has no {MANIFEST_NAME}: give a checkpoint-N directory that pipeloom wrote")
    text = _read(checkpoint / MANIFEST_NAME)
    if _read(checkpoint / SEAL_NAME) != seal(text):
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is damaged: it and {SEAL_NAME} disagree; use another checkpoint"
        )
    try:
        data = json.loads(text)
        found = (data["format"], data["version"])
    except (ValueError, KeyError, TypeError):
        found = (None, None)
    if found[0] != FORMAT:
        raise CheckpointError(f"{checkpoint / MANIFEST_NAME} is not of a pipeloom checkpoint: give one pipeloom wrote")
    if found[1] not in READABLE:
        raise CheckpointError(
            f"{checkpoint} has format version {found[1]}, this pipeloom reads {READABLE[0]} to {READABLE[-1]}: use the "
            "pipeloom that wrote it"
        )
    try:
        return Manifest.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise CheckpointError(
            f"{checkpoint / MANIFEST_NAME} is not as pipeloom writes it ({error}): use another checkpoint"
        ) from error


def root_name(name: str, ties: Mapping[str, str]) -> str:
    """The name that a parameter of this name is stored under: ties are followed to their end."""
    while name in ties:
        name = ties[name]
    return name


def verify_file(checkpoint: Path, name: str, record: FileRecord) -> None:
    """Compare one file with what the manifest says. Raises CheckpointError that names it."""
    path = checkpoint / name
    try:
        size = path.stat().st_size  # first, because it is quick
        if size != record.bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, the manifest says {record.bytes}; use another checkpoint"
            )
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest != record.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's; use another checkpoint")


def missing_or_cut(checkpoint: Path, manifest: Manifest) -> str | None:
    """The first file that is not there or has another size than the manifest says; a quick look at a checkpoint."""
    for name, record in manifest.files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != record.bytes:
            return name
    return None


def verify(checkpoint: Path) -> Manifest:
    """Read every file and compare size and SHA-256. Raises CheckpointError naming the first that is not as written."""
    manifest = read_manifest(checkpoint)
    for name, record in manifest.files.items():
        verify_file(checkpoint, name, record)
    return manifest


def read_weight_map(checkpoint: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index. The caller has verified the index."""
    return dict(json.loads(_read(checkpoint / INDEX_NAME))["weight_map"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror}): the checkpoint is damaged; use another one")
