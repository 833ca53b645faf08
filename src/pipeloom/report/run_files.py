"""Reads the files of a run: metrics, timelines, rewinds, configuration and environment."""

import json
import math
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeloom.common.json_reader import parse_json
from pipeloom.errors import InputError
from pipeloom.sim.timeline import Timeline

_MOST_STEPS = 1 << 53  # which a float still counts exactly
_MOST_DEPTH = 100  # of a configuration
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of a run.

    Attributes:
        steps: one object per training step, ascending; for a step that ran again after a resume, the later object.
        evaluations: one object per evaluation, likewise.
        truncated: whether the last line is incomplete, as after a killed run.
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    truncated: bool

    def series(self, key: str) -> list[tuple[float, float]]:
        """``(step, value)`` of each step or evaluation that has `key`; null and "NaN" become NaN."""
        rows = self.evaluations if key == "eval_loss" else self.steps
        return [(float(row["step"]), as_number(row[key])) for row in rows if key in row]

    @property
    def skipped(self) -> set[int]:
        """The steps without an optimizer step, because float16 gradients overflowed at their loss scale."""
        totals = [(0.0, 0.0), *self.series("skipped_steps")]
        return {int(step) for (_, before), (step, total) in pairwise(totals) if total > before}

    def median(self, key: str) -> float | None:
        """The median of the finite values of a metric; None without any."""
        values = [value for _, value in self.series(key) if math.isfinite(value)]
        return statistics.median(values) if values else None

    def per_rank(self, key: str) -> list[float]:
        """The maximum per rank of a metric with one value per rank; empty if no step has it."""
        lists = [row[key] for row in self.steps if isinstance(row.get(key), list)]
        ranks = max(map(len, lists), default=0)
        return [max(as_number(values[rank]) for values in lists if rank < len(values)) for rank in range(ranks)]


def as_number(value: Any) -> float:
    """A metric as a float. Other values (null, a string) become NaN, which reports show."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def step_of(row: Any) -> int:
    """The step of a row of ``metrics.jsonl``. Raises ValueError, KeyError or TypeError for another value."""
    step = row["step"]
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError("step must be an integer of at least 0")
    return step


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`, which has one object per step and one per evaluation.

    Raises:
        InputError: the file cannot be read, has no steps, or a line is not a JSON object with a step.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(
            f"{path}: {reason}. A report needs the metrics of a run: pass the --output_dir of `pipeloom train`."
        ) from error
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    truncated = False
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            step = step_of(row)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not text.endswith("\n"):
                truncated = True
                break
            raise InputError(
                f"{path}, line {number}: must be a JSON object with a step. Repair or remove the line."
            ) from error
        (evaluations if "eval_loss" in row else steps)[step] = row
    if not steps:
        raise InputError(f"{path} has no training steps. Run at least one step before a report.")
    in_order, evaluated = ([rows[step] for step in sorted(rows)] for rows in (steps, evaluations))
    return Metrics(steps=in_order, evaluations=evaluated, truncated=truncated)


def read_timelines(path: Path) -> dict[str, Timeline]:
    """The measured and the predicted timeline of `timelines.json`, as far as they exist. Raises InputError."""
    if not path.exists():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {
            kind: Timeline.from_json(found[kind] if isinstance(found[kind], str) else json.dumps(found[kind]))
            for kind in ("measured", "predicted")
            if found.get(kind) is not None
        }
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} has no valid timelines ({error}). Remove it for a report without them.") from error


class Rewind(NamedTuple):
    """A rewind of a run: `step` had a spike, and the run went back to the checkpoint of step `checkpoint`."""

    step: int
    checkpoint: int
    spike: str


def read_rewinds(path: Path) -> list[Rewind]:
    """The rewinds of ``rewinds.json``; none if it does not exist. Raises InputError."""
    if not path.exists():
        return []
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return [Rewind(int(each["step"]), int(each["checkpoint"]), str(each["spike"])) for each in found]
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{path} is not a list of rewinds. Restore or remove it.") from error


def read_configuration(path: Path) -> str:
    """The text of ``config.yaml``; empty if it does not exist. Raises InputError."""
    if not path.exists():
        return ""
    try:
        text = path.read_bytes().decode(errors="replace")
        if _is_mapping(text):
            return text.strip()
    except (OSError, ValueError, yaml.YAMLError):
        pass
    raise InputError(f"{path} is not a configuration. Remove or repair it.")


def _is_mapping(text: str) -> bool:
    """Whether YAML is a mapping. No values are made: deep ones crash libyaml, and aliases may stand for huge ones."""
    kinds, depth = list[type[yaml.Event]](), 0
    for event in yaml.parse(text, _LOADER):
        kinds = kinds if len(kinds) > 2 else [*kinds, type(event)]  # the stream, the document, and what it is
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            return False
    return kinds[2:] == [yaml.MappingStartEvent]


def read_environment(path: Path) -> tuple[dict[str, str], str]:
    """The machine and package versions of the run if it recorded them, else of this process; and a note on which."""
    if path.exists():
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
            return {str(name): str(value) for name, value in found.items()}, "Recorded by the run."
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is not a JSON object of names and values. Remove or repair it.") from error
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("pipeloom", "torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions, "Recorded when this report was written; the run recorded no environment."
