"""`flip_bits`: what becomes of single flipped bits of a checkpoint that is then read. No training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.reliability.faults import damage
from benchmarks.reliability.systems import System
from torch.distributed.checkpoint.api import CheckpointException


def flip_bits(system: System, checkpoint: Path, count: int, seed: int) -> dict[str, Any]:
    """Flip `count` bits of a checkpoint's tensor files, each alone, and read the checkpoint after each."""
    draw, whole = random.Random(seed), system.read(checkpoint)
    found = {"raised": 0, "silent": 0, "same": 0}
    for _ in range(count):
        position = draw.random()
        damage("flip", system.tensor_files(checkpoint), position)
        try:
            found["same" if system.read(checkpoint) == whole else "silent"] += 1
        except (Exception, CheckpointException):  # torch's is no Exception
            found["raised"] += 1
        damage("flip", system.tensor_files(checkpoint), position)  # back
    assert system.read(checkpoint) == whole
    return {"system": system.name, "kind": "bits", "bits": count, **found}
