"""Where the ranks of a run are, in a file of its output directory: who watches the run reads their black boxes."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.json_reader import parse_json
from pipeloom.common.process_place import ProcessPlace
from pipeloom.processes.black_box import BlackBox

PROCESSES_NAME = "processes.json"


class RankState(NamedTuple):
    """A rank as its black box and the kernel show it.

    Attributes:
        name: of the rank, such as ``rank 3``.
        state: ``running``, ``stopped``, ``ended``, or why it cannot be seen.
        phase, action: what it does, such as ``step 12`` and ``1B3``; empty if unknown.
        seconds: since its last progress; None if unknown.
    """

    name: str
    state: str
    phase: str = ""
    action: str = ""
    seconds: float | None = None


def place_of(name: str, box: BlackBox) -> dict[str, Any]:
    """Where this process and its black box are, as JSON."""
    return {**asdict(ProcessPlace.own(name)), "box": box.descriptor}


def write_places(directory: Path, places: Sequence[dict[str, Any]]) -> None:
    """Write the places of all ranks, in their order."""
    write_whole(directory / PROCESSES_NAME, json.dumps(places) + "\n")


def read_states(directory: Path) -> list[RankState]:
    """The states of all ranks now; empty where the run has not told where they are."""
    try:
        found = parse_json((directory / PROCESSES_NAME).read_text(encoding="utf-8"))
        return [
            _state(ProcessPlace(each["host"], each["process"], each["started"], each["name"]), each["box"])
            for each in found
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # an older run, or a damaged file
        return []


def _state(place: ProcessPlace, descriptor: int) -> RankState:
    if not place.is_near:
        return RankState(place.name, f"on {place.host.partition('/')[0]}: not seen from here")
    letter = place.state()
    if letter is None or letter in "ZX":
        return RankState(place.name, "ended")
    state = "stopped" if letter in "Tt" else "running"
    with suppress(OSError, ValueError):  # it ended, or is another user's
        with open(f"/proc/{place.process}/fd/{descriptor}", "rb") as file:
            box = BlackBox(file.fileno(), writable=False)
        seconds = max(0.0, time.perf_counter() - box.clock) if box.clock else None
        return RankState(place.name, state, box.phase, box.action, seconds)
    return RankState(place.name, state)
