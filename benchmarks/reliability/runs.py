"""`Runs`: of one system: its unhurt run, and a run per fault, which a user would start again; what became of each."""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.reliability.faults import DAMAGE, Fault, damage
from benchmarks.reliability.strikes import Striker
from benchmarks.reliability.systems import Pipeloom, System

from pipeloom.chaos.attempt import Attempt, Line, run_attempt
from pipeloom.chaos.fault import Order

_MOST_ATTEMPTS = 3
_LIMIT_SECONDS = 600.0  # of an attempt
_TELLS = re.compile(
    r"^pipeloom: |pre-empted|passed over|damaged|\w+(Error|Exception)\b|[Ee]xitcode|Signal \d+ \(SIG|death signal"
)
_NO_WORD = re.compile(r"exitcode *: (0|<N/A>)")
_RANK = re.compile(r"^(?:\[rank(\d+)\]|pipeloom: (?:error: )?rank (\d+)(?: in step|: ))")


class Run(NamedTuple):
    """What became of one fault. Seconds count from the strike; with a damaged checkpoint, from the start after it.

    Attributes:
        system, kind: names.
        number: of the round.
        where: rank, step or save, and part; for damage, file and byte.
        told_by, told_seconds, told: who printed the first line about the fault, when, and the line.
        named_seconds: until a line names the rank, or the damaged checkpoint; None: none did.
        ended_seconds: until all processes had ended; None: the run went on.
        given_up: whether the benchmark ended the run, since nothing happened until its cap.
        again_seconds: until the first step after it was complete.
        steps_again: complete steps that were computed once more.
        resumed: "itself", "hand" (the same command), "removed" (and the damaged checkpoint by hand), "never".
        difference: of the completed run from the unhurt one; empty: in no bit; None: never completed.
        left: processes that were there 5 s after the launcher's end, and names in /dev/shm.
    """

    system: str
    kind: str
    number: int
    where: str
    told_by: str
    told_seconds: float | None
    told: str
    named_seconds: float | None
    ended_seconds: float | None
    given_up: bool
    again_seconds: float | None
    steps_again: int
    resumed: str
    difference: str | None
    left: tuple[str, ...]


class Runs:
    """The runs of one system.

    Args:
        system: what is run.
        out: directory of the runs.
        cap_seconds: see `Striker`.
    """

    def __init__(self, system: System, out: Path, cap_seconds: float) -> None:
        self._system, self._out, self._cap_seconds = system, out, cap_seconds
        self._seconds = (0.0, 0.0)

    def reference(self) -> None:
        """The unhurt run; raises SystemExit where it fails."""
        attempt, striker = self._attempt("reference", 1, None)
        if attempt.code != 0:
            raise SystemExit(
                "\n".join([f"{self._system.name}: {attempt.code}", *(each.text for each in attempt.lines)])
            )
        times = [later[0] - earlier[0] for earlier, later in pairwise(striker.steps)]
        self._seconds = (statistics.median(times), striker.save_seconds)

    def hurt(self, fault: Fault, number: int) -> Run:
        """One run with a fault."""
        name = f"{fault.kind}-{number}"
        output_dir, where = self._out / name, _where(fault)
        resumed = "never"
        attempts: list[Attempt] = []
        strikers: list[Striker] = []
        while len(attempts) < _MOST_ATTEMPTS:
            attempt, striker = self._attempt(name, len(attempts) + 1, None if attempts else fault)
            attempts.append(attempt)
            strikers.append(striker)
            if attempt.code == 0:
                resumed = ("itself", "hand", "removed")[len(attempts) - 1 - (fault.kind in DAMAGE)]
                resumed = "hand" if resumed == "removed" and fault.kind not in DAMAGE else resumed
                break
            if fault.kind in DAMAGE:
                complete = self._system.complete(output_dir)
                newest = complete[max(complete)]
                if len(attempts) == 1:
                    where = damage(fault.kind, self._system.tensor_files(newest), fault.position)
                    damaged = newest.name
                elif newest.name == damaged:
                    shutil.rmtree(newest)
        difference = self._system.difference(output_dir, self._out / "reference") if resumed != "never" else None
        run = self._read(fault, number, attempts, strikers, damaged if fault.kind in DAMAGE else "")
        shutil.rmtree(output_dir)
        in_save = "" if fault.kind != "save-kill" or strikers[0].in_save else ", which was complete"
        return run._replace(where=where + in_save, resumed=resumed, difference=difference)

    def _attempt(self, name: str, number: int, fault: Fault | None) -> tuple[Attempt, Striker]:
        place = self._out / "logs" / f"{name}-{number}"
        place.parent.mkdir(parents=True, exist_ok=True)
        striker = Striker(self._system, self._out / name, fault, self._seconds, self._cap_seconds)
        striker.start()
        order = Order(str(place.with_name(f"{place.name}.record")), None)
        try:
            attempt = run_attempt(self._system.command(self._out / name), order, place, _LIMIT_SECONDS)
        finally:
            striker.stop()
        return attempt, striker

    def _read(
        self, fault: Fault, number: int, attempts: Sequence[Attempt], strikers: Sequence[Striker], damaged: str
    ) -> Run:
        struck = strikers[0].struck_at
        if struck is None:
            raise SystemExit(f"{self._system.name}: the run ended before {fault}")
        first = attempts[1] if damaged and len(attempts) > 1 else attempts[0]
        since = struck if first is attempts[0] else attempts[0].ended_at
        lines = [line for each in attempts for line in each.lines if line.at >= since]
        told = next((line for line in lines if _TELLS.search(line.text) and not _NO_WORD.search(line.text)), None)
        pattern = re.compile(re.escape(damaged) if damaged else rf"(?<!\[)\b(local_)?rank *:? {fault.rank}\b")
        named = None if told is None else next((each for each in lines if _names(each, told, pattern)), None)
        again, steps_again = _again([each.steps for each in strikers], since, isinstance(self._system, Pipeloom))
        went_on = first.code == 0
        return Run(
            system=self._system.name,
            kind=fault.kind,
            number=number,
            where="",
            told_by="" if told is None else _speaker(told.text),
            told_seconds=None if told is None else told.at - since,
            told="" if told is None else told.text.replace(f"{self._out}/", ""),
            named_seconds=None if named is None else named.at - since,
            ended_seconds=None if went_on else first.ended_at - since,
            given_up=any(each.given_up for each in strikers),
            again_seconds=None if again is None else again - since,
            steps_again=steps_again,
            resumed="",
            difference=None,
            left=tuple(each for attempt in attempts for each in attempt.left if not each.startswith("temporary ")),
        )


def _where(fault: Fault) -> str:
    if fault.kind in ("preempt", "agent-kill"):
        return f"step {fault.step + 1}"
    place = f"save of step {fault.step}" if fault.kind == "save-kill" else f"step {fault.step + 1}"
    return f"rank {fault.rank}, {place}"


def _names(line: Line, told: Line, pattern: re.Pattern[str]) -> bool:
    return line.at >= told.at and bool(_TELLS.search(line.text)) and bool(pattern.search(line.text))


def _speaker(line: str) -> str:
    """Who printed a line."""
    if (found := _RANK.search(line)) is not None:
        return f"rank {found[1] or found[2]}"
    if line.startswith(("pipeloom: ", "step ")):
        return "pipeloom"
    return "torchrun" if "torch/distributed/elastic" in line or re.match(r"[EWI]\d{4} ", line) else "a rank"


def _again(attempts: Sequence[list[tuple[float, int]]], since: float, truncates: bool) -> tuple[float | None, int]:
    """When the first step after a resume was complete, and how many complete steps were computed again.

    Args:
        attempts: of each, when the metrics changed, and their newest step.
        since: seconds from which on a resume counts.
        truncates: whether a resumed run truncates its metrics, before it appends the first step.
    """
    events = [event for steps in attempts for event in steps]
    newest, total, first, resumed = 0, 0, None, False
    for at, step in events:
        back = at > since and step <= newest
        resumed = resumed or back
        if back:
            total += newest - step + (not truncates)
        if resumed and first is None and not (back and truncates):
            first = at
        newest = step
    if not resumed:  # no step was lost
        first = next((at for at, _ in events if at > since), None)
    return first, total
