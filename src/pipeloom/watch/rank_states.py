"""What the ranks of a run do now: a file of its output directory says where their black boxes are."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeloom.common.json_reader import parse_json
from pipeloom.common.process_place import PROCESSES_NAME, ProcessPlace
from pipeloom.processes.black_box import BlackBox

_WORDS, _NUMBERS = ("host", "started", "name"), ("process", "box")  # of a process in the file


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


def read_states(directory: Path) -> list[RankState]:
    """The states of all ranks now; empty where the run has not told where they are."""
    try:
        found = parse_json((directory / PROCESSES_NAME).read_text(encoding="utf-8"))
        places = [([each[name] for name in _WORDS], [each[name] for name in _NUMBERS]) for each in found]
    except (OSError, ValueError, TypeError, KeyError):  # an older run, or a damaged file
        return []
    for words, numbers in places:
        if not all(isinstance(each, str) for each in words) or not all(type(each) is int for each in numbers):
            return []
    return [_state(ProcessPlace(host, process, started, name), box) for (host, started, name), (process, box) in places]


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
