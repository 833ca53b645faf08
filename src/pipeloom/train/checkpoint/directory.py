"""The directories of checkpoints: made aside, put in place by a rename, deleted through a rename.

Whatever instant a process dies at, a visible `checkpoint-N` is whole. Hidden siblings carry what is unfinished:

    .checkpoint-N.partial-X   being written            a dead one is deleted
    .checkpoint-N.old-X       being replaced           put back if checkpoint-N is missing, else deleted
    .checkpoint-N.deleted-X   being deleted            deleted

Who works on a hidden directory holds a lock (flock) on it, which the kernel drops when the process dies. No torch here.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, SEAL_NAME

_VISIBLE = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.checkpoint-(\d+)\.(partial|old|deleted)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of an output directory. `complete`: the file written last is there; `verify` says if all are whole.

    A visible entry that is not complete is damaged, or of another program."""

    step: int
    path: Path
    size_bytes: int
    complete: bool


def list_checkpoints(output_dir: Path) -> list[Listed]:
    """All checkpoints by step, and the unfinished directories of saves that are running or were killed."""
    found = []
    for path in _entries(output_dir):
        visible, hidden = _VISIBLE.fullmatch(path.name), _HIDDEN.fullmatch(path.name)
        if match := visible or hidden:
            complete = visible is not None and (path / SEAL_NAME).is_file()
            found.append(Listed(int(match[1]), path, _size_bytes(path), complete))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def latest(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step, damaged or not, or None. What a killed save left is put right first."""
    clean(output_dir)
    steps = [int(match[1]) for path in _entries(output_dir) if (match := _VISIBLE.fullmatch(path.name))]
    ours = (path for step in sorted(steps, reverse=True) if is_ours(path := checkpoint_path(output_dir, step)))
    return next(ours, None)


def resolve(path: Path) -> Path:
    """`path` itself when it is a checkpoint, or the latest checkpoint in it. Raises CheckpointError if neither."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory: give a checkpoint-N directory or the output directory of a run"
        )
    if is_ours(path) or _VISIBLE.fullmatch(path.name):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no finished checkpoint: give a directory in which pipeloom saved one")
    return found


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def clean(output_dir: Path) -> None:
    """Put right what dead saves left behind; directories that a living process works on are not touched."""
    for path in _entries(output_dir):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        with suppress(OSError), _locked(path) as free:  # a reader may lack the permission; the next save will do it
            target = checkpoint_path(output_dir, int(match[1]))
            if not free:
                continue
            if match[2] == "old" and not target.exists():
                os.rename(path, target)
                fsync_directory(output_dir)
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def partial_directory(output_dir: Path, step: int) -> Iterator[Path]:
    """A fresh hidden directory for a save; it is gone afterwards, either put in place or deleted. Raises OSError."""
    output_dir.mkdir(parents=True, exist_ok=True)
    clean(output_dir)
    with ExitStack() as stack:
        path = _make_locked(output_dir, step, stack)
        yield path


def _make_locked(output_dir: Path, step: int, stack: ExitStack) -> Path:
    """Make a partial directory and lock it until `stack` closes, which deletes it."""
    while True:
        path = _hidden(output_dir, step, "partial")
        path.mkdir()
        with ExitStack() as attempt:
            attempt.callback(shutil.rmtree, path, ignore_errors=True)
            # Until it is locked, a reader that cleans up takes the new directory for one of a dead process.
            with suppress(FileNotFoundError):
                if attempt.enter_context(_locked(path)) and path.is_dir():
                    stack.enter_context(attempt.pop_all())
                    return path


def put_in_place(partial: Path, output_dir: Path, step: int) -> Path:
    """Make a finished partial directory the checkpoint of its step; an earlier one of the same step is replaced."""
    target = checkpoint_path(output_dir, step)
    fsync_directory(partial)
    if target.exists():
        old = _hidden(output_dir, step, "old")
        with _locked(target):
            os.rename(target, old)
            os.rename(partial, target)
            fsync_directory(output_dir)
            shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, target)
        fsync_directory(output_dir)
    return target


def keep_at_most(output_dir: Path, limit: int, newest: Path) -> None:
    """Delete finished checkpoints of the lowest steps until `limit` of them are left; `newest` always stays."""
    finished = [entry for entry in list_checkpoints(output_dir) if entry.complete and entry.path != newest]
    for entry in finished[: max(0, len(finished) + 1 - limit)]:
        doomed = _hidden(output_dir, entry.step, "deleted")
        with suppress(FileNotFoundError):  # somebody else deleted it just now
            os.rename(entry.path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a directory; yields False when a living process has it. The lock follows a rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # some network file systems lock no directories: do without
            free = True
        yield free
    finally:
        os.close(descriptor)


def _hidden(output_dir: Path, step: int, kind: str) -> Path:
    return output_dir / f".checkpoint-{step}.{kind}-{secrets.token_hex(4)}"


def is_misnamed(path: Path, step: int) -> bool:
    """Whether a checkpoint after `step` has a name for another step."""
    match = _VISIBLE.fullmatch(path.name)
    return match is not None and int(match[1]) != step


def is_ours(path: Path) -> bool:
    """Whether pipeloom wrote this checkpoint, to its end: a rename made it visible, so what it lacks is lost."""
    return (path / SEAL_NAME).is_file() or (path / MANIFEST_NAME).is_file()


def _entries(output_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in output_dir.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{output_dir} cannot be read ({error.strerror}): give the output directory of a run"
        ) from error


def _size_bytes(path: Path) -> int:
    total = 0
    with suppress(OSError):  # a running save may take the directory away
        for file in path.iterdir():
            with suppress(OSError):  # or a file
                total += file.stat().st_size
    return total
