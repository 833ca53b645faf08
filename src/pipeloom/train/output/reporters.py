"""Reporters: what a run writes to TensorBoard, Weights & Biases and trackio beside ``metrics.jsonl``.

    tensorboard   event files in ``DIR/tensorboard``
    wandb         project $WANDB_PROJECT or "pipeloom"
    trackio       project $TRACKIO_PROJECT or "pipeloom"

A run of wandb and trackio has the name in ``DIR/tracking.json``, so a resumed run goes on. Steps that a killed run
trained after its last checkpoint are trained again, and reported once.
"""

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.errors import RunError
from pipeloom.report.run_files import step_of

Entry = tuple[int, bool]  # step, and whether it is an evaluation: what a row of metrics.jsonl is about

TRACKING_NAME = "tracking.json"
TENSORBOARD_NAME = "tensorboard"


def entry_of(row: Mapping[str, Any]) -> Entry:
    """What a row of ``metrics.jsonl`` is about."""
    return int(row["step"]), "eval_loss" in row


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """A line of ``metrics.jsonl``; None where it is damaged, as the last line of a killed run may be."""
    try:
        row = parse_json(line)
        step_of(row)
    except (ValueError, KeyError, TypeError):
        return None
    found: dict[str, Any] = row
    return found


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, with names such as "peak_memory_bytes/0" for those inside lists and dicts."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers_in(value).items()}
        elif isinstance(value, list | tuple):
            found |= {f"{name}/{at}": number for at, number in numbers_in(dict(enumerate(value))).items()}  # type: ignore[arg-type]
        elif isinstance(value, int | float):
            found[str(name)] = float(value)
    return found


class Reporter(ABC):
    """Reports the rows of one run."""

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Report the numbers of a step."""

    @abstractmethod
    def close(self) -> None:
        """Finish the run. Nothing is reported after it."""


class _TensorBoard(Reporter):
    def __init__(self, directory: Path, done: int) -> None:
        # TensorBoard drops what an earlier process of the run wrote of these steps.
        purged = {"purge_step": done + 1} if done else {}
        writer: Any = import_module("torch.utils.tensorboard")
        self._writer = writer.SummaryWriter(str(directory / TENSORBOARD_NAME), **purged)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class _Logged(Reporter):
    """A run of wandb or of trackio, which have the same functions."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


class Reporters:
    """All reporters of a run, on its first process.

    Args:
        names: of the reporters.
        directory: the output directory.
        config: the options of the run.
        done: completed steps; above 0 the run is resumed.
        reported: what earlier processes of this run have reported already.
    """

    def __init__(
        self, names: tuple[str, ...], directory: Path, config: Mapping[str, Any], done: int, reported: Set[Entry]
    ) -> None:
        self._reported = reported
        self._all: list[tuple[bool, Reporter]] = []  # whether it drops repeated steps itself, and the reporter
        if not names:
            return
        run = run_name(directory)
        for name in names:
            if name == "tensorboard":
                self._all.append((True, _TensorBoard(directory, done)))
                continue
            module = _module(name)
            project = os.environ.get(f"{name.upper()}_PROJECT", "pipeloom")
            given: dict[str, Any] = {"project": project, "name": run, "config": dict(config), "resume": "allow"}
            if name == "wandb":
                given |= {"id": run, "dir": str(directory)}
            self._all.append((False, _Logged(module, module.init(**given))))

    def write(self, row: Mapping[str, Any]) -> None:
        """Report a row of ``metrics.jsonl``."""
        numbers = {name: number for name, number in numbers_in(row).items() if name != "step"}
        for drops_repeated, reporter in self._all:
            if drops_repeated or entry_of(row) not in self._reported:
                reporter.write(row["step"], numbers)

    def close(self) -> None:
        """Finish all runs."""
        for _, reporter in self._all:
            reporter.close()
        self._all = []


def _module(name: str) -> Any:
    if name == "wandb":
        import wandb

        return wandb
    import trackio

    return trackio


def run_name(directory: Path) -> str:
    """The name of the run, the same for all processes that resume it."""
    path = directory / TRACKING_NAME
    if path.exists():
        try:
            name = parse_json(path.read_text(encoding="utf-8"))["run"]
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror}). Make it readable, or remove it.") from error
        except (ValueError, KeyError, TypeError):
            name = None
        if not isinstance(name, str) or not name.isprintable():
            raise RunError(f"{path} has no name of a run: the file is damaged. Remove it.")
        return name
    name = f"{directory.absolute().name}-{secrets.token_hex(4)}"
    write_whole(path, json.dumps({"run": name}) + "\n")
    return name
