"""Files that are there whole: as they were before, or as they are meant to be, whatever instant a process dies at."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".pipeloom-*.tmp"  # names of what is being written; a process that is killed leaves it behind


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends; after an error `path` is what it was.

    What is written lies beside it until then, under a hidden name. A symbolic link and what is no plain file
    (``/dev/stdout``, a named pipe) are written directly, as by `open`: a rename would take their place.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    before = _plain_mode(path)
    if before is None:
        with path.open("wb") as file:
            yield file
        return
    aside = path.with_name(UNFINISHED.replace("*", secrets.token_hex(8)))
    try:
        with aside.open("xb") as file:
            if before:
                os.fchmod(file.fileno(), before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        if error.filename not in (None, str(aside)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write all of a file by `whole_file`; text as UTF-8, with bytes that came out of the system as they were.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    with whole_file(path) as file:
        file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def _plain_mode(path: Path) -> int | None:
    """The permissions of a plain file, 0 where there is nothing yet, None for what a rename must not replace.

    Raises:
        OSError: it is a file that must not be written, or cannot be looked at.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        return None
    os.close(os.open(path, os.O_WRONLY))  # what `open` refuses is refused
    return stat.S_IMODE(found.st_mode)
