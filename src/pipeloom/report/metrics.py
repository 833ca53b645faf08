"""Reads `metrics.jsonl`, which has one object per step and one per evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError


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

    def per_rank(self, key: str) -> list[float]:
        """The maximum per rank of a metric with one value per rank; empty if no step has it."""
        lists = [row[key] for row in self.steps if isinstance(row.get(key), list)]
        ranks = max(map(len, lists), default=0)
        return [
            max((as_number(values[rank]) for values in lists if rank < len(values)), default=math.nan)
            for rank in range(ranks)
        ]


def as_number(value: Any) -> float:
    """A metric as a float. Other values (null, a string) become NaN, which reports show."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run.

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
            row = json.loads(line)
            step = int(row["step"])
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
    return Metrics(
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        truncated=truncated,
    )
