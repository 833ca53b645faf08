"""What a run shows: a progress bar on a terminal, plain lines elsewhere, and the notices before its first step."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeloom.data.corpus import Corpus
from pipeloom.train.config.schedule import is_stream, schedule_name
from pipeloom.train.config.train_config import TrainConfig, flat

# Options that change the losses of a resumed run, or the checkpoints it keeps.
_MATTERS = (
    *(f"data.{name}" for name in ("path", "mixture", "field", "tokenizer", "packing", "validation_fraction")),
    *("batch", "optimizer", "precision", "seed", "model", "save_total_limit"),
)
_MATTERS_IN_STREAMS = (  # of asynchronous schedules also: staleness of gradients, and drains
    *("schedule", "weights", "eval_steps", "save_steps"),
    *(f"parallel.{name}" for name in ("pipeline", "replicas", "cut", "in_flight")),
)
_MOST_NAMED = 3  # directories in one line
_PATHS = ("data.path", "data.tokenizer", "model.pretrained")


class Display:
    """The display of every process but the first: silent."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""

    def live(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show the loss of a step whose other metrics are not known yet."""

    def say(self, text: str) -> None:
        """Show a line."""


class _Lines(Display):
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


class _Bar(Display):
    def __init__(self, num_steps: int, done: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        columns = (TextColumn("step"), MofNCompleteColumn(), *Progress.get_default_columns()[1:2], TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn())
        self._task = self._progress.add_task("train", total=num_steps, completed=done)
        self._numbers = Text()
        self.picture = Live(Group(self._progress, self._numbers))

    def step(self, row: Mapping[str, Any]) -> None:
        self._progress.update(self._task, completed=row["step"])
        self._numbers.plain = describe(row)

    def live(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(self._task, completed=step)
        self._numbers.plain = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"

    def say(self, text: str) -> None:
        self.picture.console.print(text, markup=False, highlight=False)


@contextmanager
def display(*, shown: bool, num_steps: int, done: int, log_steps: int) -> Iterator[Display]:
    """The display of this process; silent unless `shown`."""
    if not shown:
        yield Display()
    elif not sys.stdout.isatty():
        yield _Lines(num_steps, log_steps)
    else:
        bar = _Bar(num_steps, done)
        with bar.picture:
            yield bar


def describe(row: Mapping[str, Any]) -> str:
    """The metrics of a step in one line."""
    memory = "/".join(f"{size / 2**20:.0f}" for size in row["peak_memory_bytes"])
    auxiliary = f" + {row['auxiliary_loss']:.4f}" if "auxiliary_loss" in row else ""
    skipped = f"  skipped {row['skipped_steps']}" if row.get("skipped_steps") else ""
    return (
        f"loss {row['loss']:.4f}{auxiliary}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  "
        f"bubble {row['bubble_fraction']:.1%} (predicted {row['predicted_bubble_fraction']:.1%})  "
        f"memory {memory} MiB{skipped}"
    )


# Notices


def found_text(corpora: Sequence[Corpus]) -> str:
    """``12,345 tokens of 3 files``, and the output directories of runs among them."""
    tokens, files = (sum(each) for each in zip(*((len(c.train), c.num_files) for c in corpora), strict=True))
    text, left_out = f"{tokens:,} tokens of {files} files", [place for corpus in corpora for place in corpus.left_out]
    if not left_out:
        return text
    named = ", ".join(map(str, left_out[:_MOST_NAMED]))
    more = len(left_out) - _MOST_NAMED
    return f"{text} (output of runs, left out: {named}{f' and {more} more' if more > 0 else ''})"


def skipped_notice(skipped: Mapping[str, int]) -> list[str]:
    """``["3 files skipped: 2 not UTF-8 text, 1 empty"]``, or nothing."""
    number = sum(skipped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    return [f"{number} file{'s' if number > 1 else ''} skipped: {reasons}"] if number else []


def resume_notices(
    config: TrainConfig, saved: Mapping[str, Any], checkpoint: Path, step: int, *, other_text: bool
) -> list[str]:
    """What differs from the run that wrote `checkpoint`, and whether no step is left to train."""
    before, now = dict(flat(saved)), dict(flat(config.to_mapping()))
    streams = is_stream(schedule_name(config)) or is_stream(str(before.get("schedule")))
    changed = [
        f"{key} {_shown(key, before[key])} -> {_shown(key, value)}"
        for key, value in now.items()
        if not {key, key.split(".")[0]}.isdisjoint(_MATTERS) or (streams and key in _MATTERS_IN_STREAMS)
        if key in before and _plain(key, before[key]) != _plain(key, value)
    ]
    lines = []
    if changed:
        seed = "; samples keep the order of the first seed" if config.seed != before.get("seed", config.seed) else ""
        lines.append(f"different from {checkpoint}: {', '.join(changed)}{'' if other_text else seed}")
    if other_text:
        lines.append(f"the text differs from that of {checkpoint}: the order of samples starts again")
    if config.steps <= step:
        lines.append(f"nothing to train: {checkpoint} is after step {step}, and steps={config.steps}. Raise --steps.")
    return lines


def _plain(key: str, value: Any) -> Any:
    return str(Path(value).absolute()) if key in _PATHS and isinstance(value, str) and "://" not in value else value


def _shown(key: str, value: Any) -> str:
    if key == "save_total_limit":
        return "all" if value is None else str(value)
    return "the default" if value is None else str(value)
