"""Times of a run of `pipeloom train`, whose ranks record when phases begin."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeloom.chaos.fault import VARIABLE, Order

WARM_STEPS = 2


class Times(NamedTuple):
    """Of one run, in seconds: the median step, each stall at a checkpoint but the last, and all steps."""

    step: float
    stalls: list[float]
    whole: float


def timed_run(words: Sequence[str], record: Path, steps: int) -> Times:
    """Train with the options `words`; `record` is a file that does not exist yet."""
    order = Order(str(record), None).to_json()
    command = [sys.executable, "-m", "pipeloom", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, VARIABLE: order})
    return read(record, steps)


def read(record: Path, steps: int) -> Times:
    """The times of a run, of which each is that of its slowest rank."""
    rows = [row for line in record.read_text().splitlines() if "phase" in (row := json.loads(line))]
    begins: dict[int, dict[int, float]] = {}  # rank -> step -> when it began
    saves: dict[int, dict[int, float]] = {}  # rank -> step -> when its checkpoint was begun
    ends: dict[int, float] = {}
    for row in rows:
        words = row["phase"].split()
        if words[0] == "step" and words[1].isdecimal():
            begins.setdefault(row["rank"], {})[int(words[1])] = row["at"]
        elif words[0] == "checkpoint" and row["steps"] < steps:
            saves.setdefault(row["rank"], {}).setdefault(row["steps"], row["at"])
        elif row["steps"] == steps:
            ends.setdefault(row["rank"], row["at"])
    ranks = begins.keys()
    stalls = [max(begins[rank][step + 1] - saves[rank][step] for rank in ranks) for step in saves.get(0, {})]
    plain = [step for step in range(WARM_STEPS + 1, steps) if step not in saves.get(0, {})]
    step = statistics.median(begins[0][number + 1] - begins[0][number] for number in plain)
    return Times(step, stalls, max(ends[rank] - begins[rank][WARM_STEPS + 1] for rank in ranks))
