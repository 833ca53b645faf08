"""`Record`: what the ranks of one attempt have recorded: actions per phase, file operations, steps and the strike."""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.common.json_reader import parse_json

STEPS = "step"  # how the phases of steps begin


class Strike(NamedTuple):
    """When (time.monotonic, seconds) and where a fault struck."""

    at: float
    rank: int
    where: str
    phase: str


_MOST_DIGITS = 19  # of a step
_LEAST_STEPS = 3  # before and after a strike
_KINDS: dict[str, dict[str, type]] = {  # the first key of a row that is here tells what else it has
    "struck": {"struck": str, "phase": str},
    "phase": {"phase": str, "actions": int, "files": int, "steps": int},
    "file": {"file": str, "number": int},
}


def _is_row(row: Any) -> bool:
    """Whether a line of a record is whole."""
    if not isinstance(row, dict) or type(row.get("at")) is not float:
        return False
    kind = next((kind for kind in _KINDS if kind in row), None)
    return kind is not None and all(type(row.get(key)) is each for key, each in {"rank": int, **_KINDS[kind]}.items())


class Record:
    """The lines of a record; the file need not exist."""

    def __init__(self, path: Path) -> None:
        self._rows: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for line in path.read_bytes().splitlines():
                with suppress(ValueError):  # the last line of a rank that was killed
                    row = parse_json(line)
                    if _is_row(row):
                        self._rows.append(row)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have recorded something."""
        return sorted({row["rank"] for row in self._rows})

    @property
    def strike(self) -> Strike | None:
        """The strike; None: the fault's place was not reached."""
        for row in self._rows:
            if "struck" in row:
                return Strike(row["at"], row["rank"], row["struck"], row["phase"])
        return None

    def first_step(self, since: float = 0.0) -> float | None:
        """When a rank that started at `since` or later had completed its first step (time.monotonic, seconds)."""
        return min((row["at"] for row in self._rows if row.get("steps", 0) >= 1 and row["at"] > since), default=None)

    def restarted(self, since: float) -> float | None:
        """When a rank was started again, after `since`; None: none was."""
        return min((row["at"] for row in self._rows if row.get("phase") == "setup" and row["at"] > since), default=None)

    def begun_steps(self, until: float) -> int:
        """The highest step that a rank has begun before `until`; 0: none, or the phases of its schedule do not tell."""
        words = [row["phase"].replace(",", "").split() for row in self._rows if "phase" in row and row["at"] < until]
        numbers = [each[1] for each in words if len(each) > 1 and each[0] == "step"]
        return max((int(each) for each in numbers if each.isdecimal() and len(each) < _MOST_DIGITS), default=0)

    @property
    def num_steps(self) -> int:
        """The most completed steps of any rank."""
        return max((row.get("steps", 0) for row in self._rows), default=0)

    def actions(
        self,
        rank: int,
        *,
        phases: tuple[str, ...] = ("",),
        least_steps: int = 0,
        most_steps: float = inf,
        after_saves: int = 0,
    ) -> list[range]:
        """The numbers of a rank's actions, from 1.

        Args:
            phases: how the names of their phases begin.
            least_steps, most_steps: that the rank has completed before.
            after_saves: that it has begun before.
        """
        found, saves = [], 0
        for row, after in self._phases(rank):
            saves += row["phase"].startswith("checkpoint")
            wanted = least_steps <= row["steps"] <= most_steps and saves >= after_saves
            if wanted and row["phase"].startswith(phases):
                found.append(range(row["actions"] + 1, after["actions"] + 1))
        return [each for each in found if each]

    def slower(self) -> float | None:
        """How many times as long forwards of the struck rank took in a step after the strike as before.

        Where all ranks took longer, beside the one that took least longer: the machine was slower. None: there are too
        few steps, or the ranks did not record this.
        """
        strike, grown = self.strike, dict[int, float]()
        if strike is None:
            return None
        for rank in self.ranks:
            sides: tuple[list[float], list[float]] = [], []
            for row, after in self._phases(rank, STEPS):
                seconds = after.get("forward_seconds")
                if type(seconds) is float and seconds > 0:  # an update is a phase of its own
                    sides[row["at"] > strike.at].append(seconds)
            if min(map(len, sides)) < _LEAST_STEPS:
                return None
            grown[rank] = statistics.median(sides[1]) / statistics.median(sides[0])
        others = [factor for rank, factor in grown.items() if rank != strike.rank]
        return grown[strike.rank] / max(1.0, min(others, default=1.0))

    def files(self, rank: int) -> dict[int, str]:
        """The file operations of a rank's saves by number, from 1."""
        return {row["number"]: row["file"] for row in self._rows if "file" in row and row["rank"] == rank}

    def _phases(self, rank: int, begin: str = "") -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each phase of a rank, of those whose names begin so, with the next one."""
        rows = [row for row in self._rows if row["rank"] == rank and "phase" in row and "struck" not in row]
        return (pair for pair in itertools.pairwise(rows) if pair[0]["phase"].startswith(begin))
