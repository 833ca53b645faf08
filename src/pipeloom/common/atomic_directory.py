"""Directories that are always complete: written under a hidden name, then renamed. Needs no torch.

Operations in progress on a directory NAME use hidden names beside it:

    .NAME.partial-X   is being written         deleted if its process has died
    .NAME.old-X       is being replaced        renamed back if NAME is missing, else deleted
    .NAME.deleted-X   is being deleted         deleted

A process holds a lock (flock) on its hidden directory. The kernel releases the lock when the process dies.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)


def hidden_names(name: str) -> re.Pattern[str]:
    """What hidden names match; groups: the name of the directory, and what is in progress.

    Args:
        name: a regular expression without groups for the names of the directories.
    """
    return re.compile(rf"\.({name})\.(partial|old|deleted)-[0-9a-f]+")


def hidden_path(target: Path, kind: str) -> Path:
    """A new hidden path beside `target` for an operation in progress: `partial`, `old` or `deleted`."""
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(4)}")


def clean(paths: Iterable[Path], names: re.Pattern[str]) -> None:
    """Clean up after killed processes. Directories that a live process has locked are left alone.

    Args:
        paths: the entries of a directory.
        names: which of them are hidden directories, see `hidden_names`.
    """
    for path in paths:
        match = names.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        with suppress(OSError), locked(path) as free:  # a reader may lack the permission; the next save cleans up
            target = path.with_name(match[1])
            if not free:
                continue
            if match[2] == "old" and not target.exists():
                os.rename(path, target)
                fsync_directory(target.parent)
            else:
                delete(path)


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """A new hidden directory to write, deleted at the end unless `put_in_place` renamed it.

    Hidden directories of killed processes that wrote the same target are cleaned up first. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # the directory can be written, and not read
        clean(sorted(target.parent.iterdir()), hidden_names(re.escape(target.name)))
    while True:
        path = hidden_path(target, "partial")
        path.mkdir()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            is_mine = False
            # Until it is locked, another process may clean it up as a directory of a dead process.
            with suppress(FileNotFoundError):
                is_mine = stack.enter_context(locked(path)) and path.is_dir()
            if is_mine:
                yield path
                return


def put_in_place(partial: Path, target: Path, *, replaces: bool) -> None:
    """Rename a finished partial directory to `target`, which it may replace if it has files. Raises OSError."""
    fsync_directory(partial)
    if replaces and target.exists() and any(target.iterdir()):
        old = hidden_path(target, "old")
        with locked(target):
            os.rename(target, old)
            os.rename(partial, target)
            fsync_directory(target.parent)
            delete(old)
    else:
        os.rename(partial, target)
        fsync_directory(target.parent)


def delete(path: Path) -> None:
    """Delete a directory, or a link to one; what cannot be deleted stays."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk, so that creations and renames survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some file systems flush no directories
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a directory; yields False if another process has the lock. The lock survives a rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # some network file systems do not support locks on directories
            free = True
        yield free
    finally:
        os.close(descriptor)
