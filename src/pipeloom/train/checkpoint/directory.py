"""Checkpoint directories: created, replaced and deleted by atomic renames. Needs no torch.

A directory `checkpoint-N` is always complete, even if a process is killed. Operations in progress use hidden names, see
`pipeloom.common.atomic_directory`.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeloom.common import atomic_directory
from pipeloom.common.atomic_directory import delete, hidden_names, hidden_path, locked
from pipeloom.errors import CheckpointError, InputError
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, NAME, SEAL_NAME, leads_nowhere

OWN_CHECKPOINT = ("latest", "auto")  # values of resume_from_checkpoint: in the run's own output directory

_HIDDEN = hidden_names(r"checkpoint-\d+")
_RELEASE_SECONDS = 2.0  # how long a killed run may take to release its directory


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint directory in an output directory.

    Attributes:
        step: the training step in its name.
        path: the directory.
        size_bytes: the size of its files.
        complete: whether it has the file that is written last. A directory with a visible name that is not complete is
            damaged or was not written by pipeloom. `verify` checks all files.
    """

    step: int
    path: Path
    size_bytes: int
    complete: bool


def list_checkpoints(output_dir: Path) -> list[CheckpointEntry]:
    """All checkpoints, ascending by step, with the hidden directories of running or killed saves.

    A link to a directory that is gone is a checkpoint that is not complete.
    """
    found = []
    for path in _entries(output_dir):
        visible, hidden = NAME.fullmatch(path.name), _HIDDEN.fullmatch(path.name)
        if match := visible or hidden:
            complete = visible is not None and (path / SEAL_NAME).is_file()
            step = int(match[1].removeprefix("checkpoint-"))
            found.append(CheckpointEntry(step, path, _size_bytes(path), complete))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def latest(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step, damaged or not, or None. Cleans up after killed saves first."""
    return next(checkpoints(output_dir), None)


def checkpoints(output_dir: Path) -> Iterator[Path]:
    """The checkpoints of pipeloom, damaged or not, from the highest step. Cleans up after killed saves first."""
    clean(output_dir)
    steps = [int(match[1]) for path in _entries(output_dir) if (match := NAME.fullmatch(path.name))]
    return (path for step in sorted(steps, reverse=True) if is_ours(path := checkpoint_path(output_dir, step)))


def resolve(path: Path) -> Path:
    """`path` if it is a checkpoint, else the latest checkpoint in it.

    Raises:
        CheckpointError: `path` is not a directory, or has no checkpoint.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory. Pass a checkpoint-N directory, or the output directory of a run."
        )
    if is_ours(path) or NAME.fullmatch(path.name):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no complete checkpoint. Pass the output directory of a run that saved one.")
    return found


def resume_path(wanted: str | None, output_dir: Path) -> Path | None:
    """The checkpoint to resume from, or None, as option ``resume_from_checkpoint`` says.

    Raises:
        CheckpointError: there is none, and `auto` was not asked for.
    """
    if wanted is None or wanted not in OWN_CHECKPOINT:
        return None if wanted is None else resolve(Path(wanted))
    found = latest(output_dir)
    if found is None and wanted == "latest":
        raise CheckpointError(
            f"resume_from_checkpoint=latest: {output_dir} has no finished checkpoint. Use auto to start a run, or name "
            "another output_dir."
        )
    return found


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def clean(output_dir: Path) -> None:
    """Clean up after killed saves. Directories that a live process has locked are left alone."""
    atomic_directory.clean(_entries(output_dir), _HIDDEN)


@contextmanager
def partial_directory(output_dir: Path, step: int) -> Iterator[Path]:
    """A new hidden directory for a save, deleted at the end unless `put_in_place` renamed it. Raises OSError."""
    output_dir.mkdir(parents=True, exist_ok=True)
    clean(output_dir)
    with atomic_directory.partial_directory(checkpoint_path(output_dir, step)) as partial:
        yield partial


def put_in_place(partial: Path, output_dir: Path, step: int) -> Path:
    """Rename a finished partial directory to the checkpoint of its step, replacing an earlier one of this step."""
    target = checkpoint_path(output_dir, step)
    atomic_directory.put_in_place(partial, target, replaces=True)
    return target


def check_limit(limit: int | None) -> None:
    """Raises CheckpointError if fewer than one checkpoint may be kept."""
    if limit is not None and limit < 1:
        raise CheckpointError(
            f"total_limit={limit}: at least one checkpoint must be kept. Use 1 or more, or None for no limit."
        )


def keep_at_most(output_dir: Path, limit: int | None, newest: Path) -> None:
    """Delete complete checkpoints of the lowest steps until `limit` are left; None: all. `newest` is always kept."""
    if limit is None:
        return
    complete = [entry for entry in list_checkpoints(output_dir) if entry.complete and entry.path != newest]
    for entry in complete[: max(0, len(complete) + 1 - limit)]:
        deleted = hidden_path(checkpoint_path(output_dir, entry.step), "deleted")
        with suppress(FileNotFoundError):  # another process deleted it first
            os.rename(entry.path, deleted)
        delete(deleted)


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Lock the output directory (flock; the kernel releases it with the process).

    Raises:
        InputError: another run holds it.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    while time.monotonic() <= deadline:
        with locked(directory) as free:
            if free:
                yield
                return
        time.sleep(0.02)
    raise InputError(f"output_dir={directory}: is in use by another run. Name another directory.")


def is_ours(path: Path) -> bool:
    """Whether pipeloom wrote this directory. It was complete when it got its name, so missing files are a damage.

    So is a directory that is gone, where a link to it is left.
    """
    if leads_nowhere(path):
        return True
    if (path / SEAL_NAME).is_file() or (path / MANIFEST_NAME).is_file():
        return True
    return any(path.glob("optimizer-?????-of-?????.safetensors"))  # both are gone


def _entries(output_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in output_dir.iterdir() if path.is_dir() or leads_nowhere(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{output_dir} cannot be read ({error.strerror}). Pass the output directory of a run."
        ) from error


def _size_bytes(path: Path) -> int:
    total = 0
    with suppress(OSError):  # a running save may rename the directory
        for file in path.iterdir():
            with suppress(OSError):  # or delete a file
                total += file.stat().st_size
    return total
