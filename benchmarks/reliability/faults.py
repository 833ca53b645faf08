"""The faults, drawn with a seed: the same for every system."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pipeloom.chaos.flip import flip_at, place_in

KINDS = {
    "kill": "SIGKILL of a rank in a step",
    "save-kill": "SIGKILL of a rank during a save",
    "hang": "SIGSTOP of a rank in a step",
    "flip": "a bit of the newest checkpoint is flipped",
    "truncate": "a file of the newest checkpoint is truncated",
    "preempt": "SIGTERM to the launcher or agent",
    "agent-kill": "SIGKILL of the launcher or agent",
}
DAMAGE = ("flip", "truncate")  # of a checkpoint; the run ends before by SIGKILL of all its processes


class Fault(NamedTuple):
    """One fault.

    Attributes:
        kind: a key of `KINDS`.
        rank: which rank a signal strikes.
        step: strikes in the step after this one; with `save-kill`, in the save of this step.
        part: when, as a fraction of a step or of a save.
        position: where a checkpoint is damaged, as a fraction of its bytes.
    """

    kind: str
    rank: int
    step: int
    part: float
    position: float


def draw(kind: str, number: int, seed: int, steps: int, save_steps: int) -> Fault:
    """The fault of a round, counted from 1; after the first checkpoint and in the first three quarters of the run.

    Damage comes after the second checkpoint, so that an earlier one is good.
    """
    random_ = random.Random(f"{seed} {kind} {number}")
    first = save_steps * (2 if kind in DAMAGE else 1)
    step = random_.randrange(first + 1, max(first + 2, steps * 3 // 4))
    if kind == "save-kill":
        step = save_steps * random_.randrange(2, max(3, steps // save_steps))
    return Fault(kind, random_.randrange(2), step, random_.random(), random_.random())


def damage(kind: str, files: Iterable[Path], position: float) -> str:
    """Flip a bit of a checkpoint's tensor files, or truncate one of them; returns file and byte."""
    path, offset = place_in(sorted(files), position)
    if kind == "truncate":
        os.truncate(path, offset)
    else:
        flip_at(path, offset)
    return f"{path.name}, byte {offset}"
