"""The output directory of a run: locked, with outputs of earlier runs moved aside, and written atomically."""

import errno
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from pipeloom.common.atomic_file import UNFINISHED, write_whole
from pipeloom.common.quantities import counted
from pipeloom.errors import RunError
from pipeloom.processes.black_box import BlackBox
from pipeloom.schedules import user_defined as own_schedule
from pipeloom.sim import Timeline
from pipeloom.train.checkpoint.directory import OWN_CHECKPOINT, clean, list_checkpoints
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.written import CONFIG_HEAD, RUN_FILES
from pipeloom.train.output.reporters import Entry, Reporters, entry_of, row_of
from pipeloom.version import __version__


def prepare_output(
    config: TrainConfig,
    resumed: Path | None,
    step: int,
    *,
    goes_on: bool = False,
    environment: Mapping[str, str] | None = None,
) -> tuple[str | None, set[Entry]]:
    """Make the output directory ready for the steps after `step`; one process calls it.

    A resumed run keeps its metrics up to the checkpoint. Later checkpoints, and all files of another run, are moved
    into ``previous-1/``, ``previous-2/``, ... Unfinished files of killed processes are cleaned up. A run
    that `goes_on` without a checkpoint keeps its files too.

    Args:
        config, resumed, step, goes_on: see above.
        environment: facts for ``environment.json``, in addition to versions and machine.

    Returns:
        One line that says what was moved and what metrics are lost, or None; and what earlier processes of this run
        wrote in its metrics.
    """
    directory = Path(config.output_dir)
    clean(directory)
    for folder in (directory, directory / "data"):  # all processes of this run have their tokens by now
        for unfinished in folder.glob(UNFINISHED):
            unfinished.unlink(missing_ok=True)
    goes_on = goes_on or (resumed is not None and resumed.absolute().parent == directory.absolute())
    later = [entry.path for entry in list_checkpoints(directory) if not goes_on or entry.step > step]
    stale = [path for path in later if not path.name.startswith(".")]
    if not goes_on:
        stale += [directory / name for name in RUN_FILES if (directory / name).exists()]
    if stale:
        taken = (directory / f"previous-{number}" for number in itertools.count(1))
        place = next(path for path in taken if not path.exists())
        place.mkdir()
        for path in stale:
            path.rename(place / path.name)
    said = [f"{'later checkpoints were' if goes_on else 'an earlier run was'} moved to {place}"] if stale else []
    written = set[Entry]()
    if goes_on:
        written = _cut_metrics(directory / "metrics.jsonl", step)
        if lost := _lost_rows({number for number, evaluates in written if not evaluates}, step):
            said.append(f"{directory / 'metrics.jsonl'} has no rows of {counted(lost, 'earlier step')}")
    write_whole(
        directory / "config.yaml",
        f"{CONFIG_HEAD}{__version__}; repeat this run: pipeloom train --config {directory.absolute() / 'config.yaml'}\n"
        + to_yaml(repeatable(config)),
    )
    facts = {
        "pipeloom": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads a rank": torch.get_num_threads(),
        **(environment or {}),
    }
    write_whole(directory / "environment.json", json.dumps(facts, indent=2) + "\n")
    return "; ".join(said) or None, written


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a RunError that names the file.

    Raises:
        RunError: a file cannot be written, such as on a full disk.
    """
    try:
        yield
    except OSError as error:
        advice = "Free space" if error.errno in _FULL else "Make the directory writable"
        raise RunError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. {advice}, then resume with "
            "--resume_from_checkpoint latest."
        ) from error


def write_timelines(directory: Path, measured: Timeline, predicted: Timeline) -> None:
    """Write ``timelines.json``: the report and `pipeloom watch` draw both."""
    texts = {name: json.loads(each.to_json()) for name, each in (("measured", measured), ("predicted", predicted))}
    path = directory / "timelines.json"
    with writing(path):
        write_whole(path, json.dumps(texts))


def _cut_metrics(path: Path, step: int) -> set[Entry]:
    """Drop the lines after `step`, and an unfinished last line of a killed run; returns what all lines were about."""
    if not path.exists():
        return set()
    kept, found = [], set()
    for line in path.read_bytes().splitlines(keepends=True):
        row = row_of(line)
        if row is not None and line.endswith(b"\n"):
            entry = entry_of(row)
            found.add(entry)
            if entry[0] <= step:
                kept.append(line)
    write_whole(path, b"".join(kept))
    return found


def _lost_rows(steps: set[int], step: int) -> int:
    """How many steps before `step` are missing behind the first one that is there; all of them if none is there.

    The row of `step` itself may come later.
    """
    return sum(number not in steps for number in range(min(steps, default=1), step))


def read_entries(directory: Path) -> set[Entry]:
    """What the whole lines of the metrics in an output directory are about."""
    path, found = directory / "metrics.jsonl", set()
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        row = row_of(line)
        if row is not None and line.endswith(b"\n"):
            found.add(entry_of(row))
    return found


class Journal:
    """The current phase and the metrics of a run.

    Args:
        black_box: of this process; None: phases are not recorded.
        directory: of ``metrics.jsonl``; None for all processes but the first, which write none.
        keeps_rows: whether rows that cannot be written, such as on a full disk, are kept in memory and written later.

    Attributes:
        reporters: where rows go too; set once the directory is ready.
    """

    def __init__(self, black_box: BlackBox | None, directory: Path | None, *, keeps_rows: bool = False) -> None:
        self._black_box, self._directory, self._keeps_rows = black_box, directory, keeps_rows
        self._rows: list[str] = []  # that are not written yet
        self.reporters: Reporters | None = None

    def enter(self, phase: str, *, patient: bool = True) -> None:
        """Record in the black box which phase begins, and whether it may make no progress for long."""
        if self._black_box is not None:
            self._black_box.enter(phase, patient=patient)

    def progressed(self, phase: str) -> None:
        """Record in the black box that a part of a phase is done; see `BlackBox.progressed`."""
        if self._black_box is not None:
            self._black_box.progressed(phase)

    def count_step(self) -> None:
        """Record in the black box that a step is complete."""
        if self._black_box is not None:
            self._black_box.count_step()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row to ``metrics.jsonl``; nan and inf are written as null, as JSON needs."""
        if self._directory is None:
            return
        row = _fit(row)
        self._rows.append(json.dumps(row, allow_nan=False) + "\n")
        try:
            self.flush()
        except RunError as error:
            if not self._keeps_rows:
                raise
            if len(self._rows) == 1:
                reason = str(error).partition(", then resume")[0].rpartition(". ")[0]
                sys.stderr.write(f"pipeloom: warning: {reason}. Training goes on, and rows are written later.\n")
                sys.stderr.flush()
        if self.reporters is not None:
            self.reporters.write(row)

    def flush(self) -> None:
        """Write the rows that could not be written before.

        Raises:
            RunError: they still cannot be written.
        """
        if self._directory is None or not self._rows:
            return
        path = self._directory / "metrics.jsonl"
        with writing(path):
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(self._rows))
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)  # without a part of a row
                raise
        self._rows.clear()

    def close(self) -> None:
        """Write what is left, if that is possible, and finish what the reporters write."""
        with suppress(RunError):
            self.flush()
        if self.reporters is not None:
            self.reporters.close()


def _fit(value: Any) -> Any:
    """A value of JSON, with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _fit(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_fit(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def repeatable(config: TrainConfig) -> TrainConfig:
    """`config` so that it means the same in any working directory and starts the run from its beginning.

    Paths become absolute. A run that was resumed from a checkpoint of its own output directory is one run: repeating
    it starts at step 0. A checkpoint of another run stays its start.
    """

    def absolute(path: str | None) -> str | None:
        return path and str(Path(path).absolute())

    resume = config.resume_from_checkpoint
    if resume is not None:
        own = resume in OWN_CHECKPOINT or Path(resume).absolute().parent == Path(config.output_dir).absolute()
        resume = None if own else absolute(resume)
    kind, _, offload_dir = (config.memory.offload or "").partition(":")
    if offload_dir:
        config = config.changed("memory", offload=f"{kind}:{absolute(offload_dir)}")
    return replace(
        config.changed("data", path=absolute(config.data.path), tokenizer=absolute(config.data.tokenizer)).changed(
            "model", pretrained=absolute(config.model.pretrained)
        ),
        plan=None,  # the other options have its values; its orders are `schedule`
        schedule=config.schedule and own_schedule.absolute(config.schedule),
        output_dir=str(Path(config.output_dir).absolute()),
        checkpoint_key_file=absolute(config.checkpoint_key_file),
        resume_from_checkpoint=resume,
    )


def to_yaml(config: TrainConfig) -> str:
    """The text of ``config.yaml``."""
    text: str = yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True)
    return text
