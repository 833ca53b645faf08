"""Atomic file writes: a file has its old or its new content, even if the process is killed while it writes."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeloom.errors import InputError

UNFINISHED = ".pipeloom-*.tmp"  # temporary files; a killed process leaves them behind


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends; after an error, `path` is unchanged.

    The temporary file has a hidden name in the same directory. Symbolic links and special files (``/dev/stdout``,
    named pipes) are written directly, as by `open`, because a rename would replace them.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    before = _plain_mode(path)
    if before is None:
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(UNFINISHED.replace("*", secrets.token_hex(8)))
    try:
        with temporary.open("xb") as file:
            if before:
                os.fchmod(file.fileno(), before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` with `whole_file`; text as UTF-8, with undecodable bytes of file names restored.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    with whole_file(path) as file:
        file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def check_named(paths: Mapping[str, str | None]) -> None:
    """Check paths that `write_named` takes, before the work whose result is written there.

    Args:
        paths: by option; None: nothing is written.

    Raises:
        InputError: one is a directory, its directory does not exist, it is not writable, or two are the same file.
    """
    first: dict[Path, str] = {}
    for option, path in paths.items():
        if path is not None and (problem := _problem(Path(path))):
            raise InputError(f"{option} {path}: {problem}.")
        is_special = path is not None and Path(path).exists() and not Path(path).is_file()  # such as /dev/null
        if path is not None and not is_special and (same := first.setdefault(Path(path).resolve(), option)) != option:
            raise InputError(f"{option} {path}: is the file of {same} too. Use another path.")


def _problem(target: Path) -> str:
    """Why a file could not be written, and what to do; empty: no reason is known."""
    try:
        if target.is_dir():
            return "is a directory. Use the path of a file"
    except OSError as error:  # no search permission
        return f"{error.strerror}. Use a writable path"
    if target.parent.exists() and not target.parent.is_dir():
        return f"{target.parent} is a file. Use another path"
    if not target.parent.is_dir():
        return f"directory {target.parent} does not exist. Make it, or use another path"
    if os.access(target if target.exists() else target.parent, os.W_OK):
        return ""
    return f"{os.strerror(errno.EACCES)}. Use a writable path"


def write_named(option: str, path: str, content: str | bytes) -> None:
    """Write the file that a command line names, as `write_whole`.

    Raises:
        InputError: the file cannot be written; the message begins with `option` and `path`.
    """
    try:
        write_whole(Path(path), content)
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}. Use a writable path.") from error


def _plain_mode(path: Path) -> int | None:
    """The permissions of a regular file, 0 if `path` does not exist, None for links and special files.

    Raises:
        OSError: the file is not writable, or its directory cannot be searched.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        return None
    os.close(os.open(path, os.O_WRONLY))  # a rename would ignore missing write permission
    return stat.S_IMODE(found.st_mode)
