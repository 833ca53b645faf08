"""Progress of tokenizing: a bar on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeloom.common.quantities import bytes_text

_LINE_SECONDS = 10.0


@contextmanager
def tokenizing(num_bytes: int, done: int, *, shows: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A function to call with bytes read and tokens written since the last call.

    Args:
        num_bytes: of all shards.
        done: of these, bytes that were tokenized before.
        shows: whether anything is shown.
    """
    if not shows:
        yield lambda num_bytes, num_tokens: None
    elif sys.stdout.isatty():
        with _bar(num_bytes, done) as tell:
            yield tell
    else:
        yield _lines(num_bytes, done)


def _lines(num_bytes: int, done: int) -> Callable[[int, int], None]:
    first = last = time.monotonic()
    tokens = 0

    def tell(more_bytes: int, more_tokens: int) -> None:
        nonlocal done, tokens, last
        done, tokens = done + more_bytes, tokens + more_tokens
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            print(_words(done, num_bytes, tokens, now - first), flush=True)

    return tell


@contextmanager
def _bar(num_bytes: int, done: int) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[1:2], TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as progress:
        task, tokens, first = progress.add_task("tokenizing", total=num_bytes, completed=done), 0, time.monotonic()

        def tell(more_bytes: int, more_tokens: int) -> None:
            nonlocal done, tokens
            done, tokens = done + more_bytes, tokens + more_tokens
            words = _words(done, num_bytes, tokens, time.monotonic() - first)
            progress.update(task, completed=done, description=words)

        yield tell


def _words(done: int, num_bytes: int, tokens: int, seconds: float) -> str:
    speed = tokens / seconds if seconds else 0.0
    return f"tokenized {bytes_text(done)} of {bytes_text(num_bytes)}  {speed:,.0f} tokens/s"
