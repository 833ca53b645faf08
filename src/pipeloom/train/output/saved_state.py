"""The state of `pipeloom train` in a checkpoint, validated before a run goes on from it. Needs no torch."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import CheckpointError, folded

MOST_SAMPLES = 1 << 60  # numpy counts them in 64 bits


def check_saved_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Validate the state of the trainer.

    Args:
        checkpoint: the directory, for error messages.
        state: of its manifest.

    Raises:
        CheckpointError: `pipeloom train` did not write it.
    """
    if not isinstance(state.get("model"), dict) or not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{checkpoint}: was not written by `pipeloom train`. Name one that was.")
    for name, parts in _PARTS.items():
        if name not in state and name in _OPTIONAL:
            continue
        row = state.get(name)
        if not isinstance(row, dict):
            raise CheckpointError(f"{checkpoint}: state {name} is {folded(row)}, not an object. Use another one.")
        for key, (is_right, optional) in parts.items():
            if not (optional and key not in row) and not is_right(row.get(key)):
                raise CheckpointError(
                    f"{checkpoint}: state {name}.{key}={folded(row.get(key))} is damaged. Use another checkpoint."
                )


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < MOST_SAMPLES


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_SAMPLES


def _is_scale(value: object) -> bool:
    return isinstance(value, float | int) and 0 < value <= sys.float_info.max


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is float and math.isfinite(each) for each in value)


def _are_ranges(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 2 for each in value):
        return False
    return all(_is_count(start) and _is_count(stop) and start < stop for start, stop in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_Rule = tuple[Callable[[object], bool], bool]  # of a value, and whether earlier releases left it out
_PARTS: dict[str, dict[str, _Rule]] = {
    "sampler": {
        "samples_seen": (_is_count, False),
        "seed": (_is_whole, False),
        "num_windows": (_is_count, False),
        "passed_over": (_are_ranges, True),
        "data": (_is_text, True),
    },
    "recent_steps": {"loss": (_are_numbers, False), "gradient norm": (_are_numbers, False)},
    "loss_scaler": {"scale": (_is_scale, False), "num_finite": (_is_count, False), "num_skipped": (_is_count, False)},
}
_OPTIONAL = ("recent_steps", "loss_scaler")
