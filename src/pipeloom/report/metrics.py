"""Read `metrics.jsonl`: one object a step, and one for each evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What a run wrote down.

    Attributes:
        steps: the object of every training step, ascending; of a step that ran twice (after a resume) the later one.
        evaluations: the object of every evaluation, likewise.
        torn: whether the last line was cut off in the middle, as a killed run leaves it.
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    torn: bool

    def series(self, key: str) -> list[tuple[float, float]]:
        """``(step, value)`` of every step or evaluation that has `key`; null and "NaN" are NaN."""
        rows = self.evaluations if key == "eval_loss" else self.steps
        return [(float(row["step"]), as_number(row[key])) for row in rows if key in row]

    def per_rank(self, key: str) -> list[float]:
        """For each rank, the largest value of a metric that lists one value a rank; empty if there is none."""
        lists = [row[key] for row in self.steps if isinstance(row.get(key), list)]
        ranks = max(map(len, lists), default=0)
        return [
            max((as_number(values[rank]) for values in lists if rank < len(values)), default=math.nan)
            for rank in range(ranks)
        ]


def as_number(value: Any) -> float:
    """A metric as a float. A value that is no number (null, a word) is NaN: shown, never dropped."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run.

    Raises:
        InputError: the file cannot be read, has no steps, or has a line that is no JSON object with a step.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(
            f"{path}: {reason}: a report is made from the metrics of a run; name the --output_dir of a `pipeloom train`"
        ) from error
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    torn = False
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not text.endswith("\n"):
                torn = True
                break
            raise InputError(
                f"{path} line {number} is no JSON object with a step: each line holds one; repair or drop the line"
            ) from error
        (evaluations if "eval_loss" in row else steps)[step] = row
    if not steps:
        raise InputError(f"{path} has no training steps: a report needs at least one; train first")
    return Metrics(
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        torn=torn,
    )
