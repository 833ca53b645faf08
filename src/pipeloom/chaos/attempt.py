"""`run_attempt`: one start of a training run under a fault campaign: its lines with times, its end, what it leaves."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipeloom.chaos import leftovers
from pipeloom.chaos.fault import VARIABLE, Order
from pipeloom.chaos.record import Record
from pipeloom.common.process_place import children

_POLL_SECONDS = 0.005
_LOGS_OF_TORCHRUN = "torchelastic_"  # a directory that it keeps after a failure
_REST_SECONDS = 5.0  # how long processes may take to end after the one that started them


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a process printed, and when this process saw it (time.monotonic, seconds)."""

    at: float
    text: str


@dataclass(slots=True)
class Attempt:
    """One start of a run.

    Attributes:
        code: its exit code, negative for a signal; None: it was ended because it took too long.
        ended_at: when all its processes had ended (time.monotonic, seconds).
        lines: what it printed, in order of arrival.
        record: of its ranks.
        left: what it has left behind.
    """

    code: int | None
    ended_at: float
    lines: list[Line]
    record: Record
    left: list[str] = field(default_factory=list)

    def first_line(self, pattern: str, since: float) -> Line | None:
        """The first line that matches a regular expression, from a time on."""
        return next((line for line in self.lines if line.at >= since and re.search(pattern, line.text)), None)


def run_attempt(command: Sequence[str], order: Order, place: Path, limit_seconds: float) -> Attempt:
    """Run a command until all its processes have ended, for at most `limit_seconds`.

    Args:
        command: of the run.
        order: for its ranks.
        place: begins the names of the files with what it prints.
    """
    before, known, segments = leftovers.descendants(), children(), leftovers.segments()
    with tempfile.TemporaryDirectory(prefix="pipeloom-chaos-") as temporary:
        environment = {**os.environ, VARIABLE: order.to_json(), "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        with _printed(place, "out") as out, _printed(place, "err") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, process_group=0
            )
            try:
                lines, deadline = _Lines((out, errors)), time.monotonic() + limit_seconds
                code = _wait(process.poll, lines, deadline)
                left = _rest(before, lines, process.pid if code is None else 0)
            finally:  # also where the campaign is interrupted
                while rest := leftovers.descendants() - before:  # again: one may have started another meanwhile
                    leftovers.end(rest)
                ended_at = time.monotonic()
                process.wait()
                leftovers.reap(known)
            lines.look()
        left += [f"/dev/shm/{name}" for name in sorted(leftovers.segments() - segments)]
        names = sorted(leftovers.files(Path(temporary)))
        left += [f"temporary file {name}" for name in names if not name.startswith(_LOGS_OF_TORCHRUN)]
    return Attempt(code, ended_at, lines.found, Record(Path(order.record)), left)


def _printed(place: Path, kind: str) -> IO[bytes]:
    return place.with_name(f"{place.name}.{kind}").open("w+b")


def _wait(poll: Callable[[], int | None], lines: "_Lines", deadline: float) -> int | None:
    while (code := poll()) is None and time.monotonic() < deadline:
        lines.look()
        time.sleep(_POLL_SECONDS)
    return code


def _rest(before: set[int], lines: "_Lines", late: int) -> list[str]:
    """Wait for all processes of a run, end those that stay, and name them; `late`: one to end at once, or 0."""
    deadline = time.monotonic() + (0.0 if late else _REST_SECONDS)
    while rest := leftovers.descendants() - before:
        if time.monotonic() > deadline:
            leftovers.end(rest)
            break
        lines.look()
        time.sleep(_POLL_SECONDS)
    return [f"process {process}" for process in sorted(rest - {late})]


class _Lines:
    """Reads what a process appends to files, with the time when each line is seen."""

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        self._files = [Path(file.name).open("rb") for file in files]  # noqa: SIM115 - closed with the object
        self._rests = [b"" for _ in files]
        self.found: list[Line] = []

    def look(self) -> None:
        now = time.monotonic()
        for index, file in enumerate(self._files):
            text = self._rests[index] + file.read()
            *whole, self._rests[index] = text.split(b"\n")
            self.found += [Line(now, line.decode(errors="replace")) for line in whole]
