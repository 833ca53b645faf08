"""The display of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Display(Protocol):
    def step(self, row: Mapping[str, Any]) -> None: ...
    def live(self, step: int, loss: float, tokens_per_second: float) -> None: ...
    def say(self, text: str) -> None: ...


class _Silent:
    """The display of every process but the first."""

    def step(self, row: Mapping[str, Any]) -> None:
        pass

    def live(self, step: int, loss: float, tokens_per_second: float) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class _Lines:
    def __init__(self, num_steps: int, log_steps: int) -> None:
        self._num_steps = num_steps
        self._log_steps = log_steps
        self._first = True
        self._live = 0  # the last step shown while in flight

    def step(self, row: Mapping[str, Any]) -> None:
        due = self._first or row["step"] % self._log_steps == 0 or row["step"] == self._num_steps
        if due and row["step"] > self._live:
            print(f"step {row['step']}/{self._num_steps}  {describe(row)}", flush=True)
        self._first = False

    def live(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self._first or step % self._log_steps == 0:
            print(f"step {step}/{self._num_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s", flush=True)
            self._live = step
        self._first = False

    def say(self, text: str) -> None:
        print(text, flush=True)


class _Bar:
    def __init__(self, num_steps: int, done: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        columns = (TextColumn("step"), MofNCompleteColumn(), *Progress.get_default_columns()[1:2], TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn())
        self._task = self._progress.add_task("train", total=num_steps, completed=done)
        self._numbers = Text()
        self._live = Live(Group(self._progress, self._numbers))
        self._live.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._progress.update(self._task, completed=row["step"])
        self._numbers.plain = describe(row)

    def live(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(self._task, completed=step)
        self._numbers.plain = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()


@contextmanager
def display(*, shown: bool, num_steps: int, done: int, log_steps: int) -> Iterator[Display]:
    """The display of this process; silent unless `shown`."""
    if not shown:
        yield _Silent()
    elif not sys.stdout.isatty():
        yield _Lines(num_steps, log_steps)
    else:
        bar = _Bar(num_steps, done)
        try:
            yield bar
        finally:
            bar.stop()


def describe(row: Mapping[str, Any]) -> str:
    """The metrics of a step in one line."""
    skipped = f"  skipped {row['skipped_steps']}" if row.get("skipped_steps") else ""
    return (
        f"loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  "
        f"bubble {row['bubble_fraction']:.1%} (predicted {row['predicted_bubble_fraction']:.1%})  "
        f"memory {_mebibytes(row['peak_memory_bytes'])} MiB{skipped}"
    )


def _mebibytes(sizes_bytes: Sequence[int]) -> str:
    return "/".join(f"{size / 2**20:.0f}" for size in sizes_bytes)
