"""Standard streams of a command: closed ones, and writes that fail."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pipeloom.errors import RunError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stream(io.FileIO):
    """A descriptor that is written to until a write fails; later writes are discarded."""

    def __init__(self, descriptor: int, *, lasting: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lasting = lasting
        self._failed = False

    def write(self, data: "ReadableBuffer", /) -> int:
        if not self._failed:
            try:
                return super().write(data)
            except OSError as error:
                self._failed = True
                problem = f"standard output cannot be written: {error.strerror}"
                if not self._lasting:
                    if isinstance(error, BrokenPipeError):
                        raise
                    raise RunError(f"{problem}. Free space, or redirect to another file.") from error
                if self.fileno() == 1:
                    rest = "the run continues without it; metrics.jsonl has the metrics"
                    sys.stderr.write(f"pipeloom: warning: {problem}; {rest}\n")
        return memoryview(data).nbytes


@contextmanager
def standard_streams(*, lasting: bool) -> Iterator[None]:
    """Replace closed standard streams by null devices, and handle failing writes.

    Args:
        lasting: warn once and go on without output, so that a long run survives its terminal.

    Raises:
        BrokenPipeError: the reader of a pipe is gone, unless `lasting`.
        RunError: standard output cannot be written, unless `lasting`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # so that no other file gets descriptor 0, 1 or 2
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115  # stays open
            if stream.fileno() == number:  # ranks inherit it
                os.set_inheritable(number, True)
            setattr(sys, name, stream)
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):  # for a terminal without UTF-8; stderr escapes anyway
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = _guarded(sys.stdout, 1, lasting)
    if lasting:
        sys.stderr = _guarded(sys.stderr, 2, lasting)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before


def _guarded(stream: IO[str], number: int, lasting: bool) -> IO[str]:
    """`stream` over a `_Stream`, if it is the interpreter's own."""
    try:
        own = isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        own = False
    if not own:
        return stream
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number, lasting=lasting)),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
