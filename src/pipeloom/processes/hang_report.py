"""`RankReport`: what a rank does that makes no progress, and which of several ranks holds up the others."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pipeloom.errors import listed
from pipeloom.ir import Op
from pipeloom.ir.text import parse_action

_MOST_NOTICED = 4  # ranks in one line
# How much longer phases that are no steps may take, and at least: with a given limit, and without.
_PATIENCE, _PATIENT_SECONDS, _PATIENT_DEFAULT_SECONDS = 10.0, 300.0, 1800.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank when the ranks were asked.

    Attributes:
        rank: in the default group.
        name: ``rank 3``, with its place in a mesh ``rank 3 (rank 1 of replica 1)``.
        phase, action: as in its black box.
        seconds: without progress.
        waits: the ranks that it waits for; None: it waits for none.
        line: the innermost line of Python that it runs, outside torch and the standard library.
        hung: whether it makes no progress; else it is busy, or in a phase that may take long.
        limit_seconds: without progress, after which its watchdog asks all ranks and may end the run.
    """

    rank: int
    name: str
    phase: str
    action: str
    seconds: float
    waits: tuple[int, ...] | None
    line: str
    hung: bool
    limit_seconds: float = math.inf

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankReport":
        values = json.loads(text)
        return cls(**{**values, "waits": values["waits"] and tuple(values["waits"])})

    @property
    def place(self) -> str:
        """``in step 12, action 1F3 (stage 1, micro-batch 3)``."""
        found = f"in {self.phase}" if self.phase else ""
        if self.action:
            stage, op, microbatch, _ = parse_action(self.action)
            unit = "update" if op is Op.STEP else "micro-batch"
            inside = f"stage {stage}" + ("" if microbatch is None else f", {unit} {microbatch}")
            found += f"{', ' if found else 'in '}action {self.action} ({inside})"
        return found or "before its first action"

    def __str__(self) -> str:
        waits = f"waits for {ranks_text(self.waits)}" if self.waits else "waits for no rank"
        return f"{self.name} {self.place}: no progress for {self.seconds:.1f} s, {waits}, at {self.line}"


class NoticeTimes:
    """When a rank says that it makes no progress in a phase that may take long: ever more rarely.

    Args:
        first_seconds: without progress, until the first time.
        least_seconds: between two times, over all ranks; doubled with each time in the same phase.
    """

    def __init__(self, first_seconds: float, least_seconds: float) -> None:
        self.first_seconds, self._least = first_seconds, least_seconds
        self._phase, self._gap, self._last = "", least_seconds / 2, -math.inf

    def is_due(self, phase: str, stuck_seconds: float, now: float) -> bool:
        """Whether to ask all ranks `now`, after so long without progress in `phase`."""
        if phase != self._phase:
            self._phase, self._gap = phase, self._least / 2
        return stuck_seconds >= self.first_seconds and now - self._last >= max(self._least, self._gap)

    def take_part(self, stuck_seconds: float, now: float) -> None:
        """The ranks were asked `now`, by this one or another."""
        if self.is_stuck(stuck_seconds):
            self._gap *= 2
        self._last = now

    def is_stuck(self, stuck_seconds: float) -> bool:
        """Whether a rank without progress for so long counts as stuck, where another one asks."""
        return stuck_seconds >= self.first_seconds / 2


def patient_seconds(seconds: float | None, limit_seconds: float = 0.0) -> float:
    """How long a phase that is no step may make no progress, where a step may for `limit_seconds`.

    Args:
        seconds: the limit that was given; None: none was.
        limit_seconds: at least the given one.
    """
    least = _PATIENT_DEFAULT_SECONDS if seconds is None else _PATIENT_SECONDS
    return max(least, _PATIENCE * max(limit_seconds, seconds or 0.0))


class Verdict(NamedTuple):
    """What the reports say together.

    Attributes:
        culprits: the ranks that hold up the others; empty: ranks wait for each other in a cycle.
        line: for the user; empty: no rank is hung.
    """

    culprits: tuple[int, ...]
    line: str


def judge(
    reports: Sequence[RankReport], silent: Mapping[int, str], limit_seconds: float, unreachable: str = ""
) -> Verdict:
    """Find the rank that waits for no other rank, by following the peers that each rank waits for.

    Args:
        reports: of the ranks that answered; at least one.
        silent: a sentence about each rank that did not.
        limit_seconds: without progress, after which a rank counts as hung.
        unreachable: a sentence about why no other rank can be asked; empty: they were asked.
    """
    by_rank = {report.rank: report for report in reports}
    fix = f"If it only needs longer, raise the watchdog's limit of {limit_seconds:g} s (--watchdog_seconds)."
    reached = _reached(by_rank, [report.rank for report in reports if report.hung])
    free = [report for report in reports if report.waits is None and report.rank in reached]
    waiting = _waiting([report.rank for report in reports if report.waits])
    if lost := [rank for rank in silent if rank in reached or not free]:
        words = "; ".join(silent[rank] for rank in lost)
        return Verdict(tuple(lost), f"{words}{waiting}. {fix}")
    if hung := [report for report in free if report.hung]:
        culprit = max(hung, key=lambda report: report.seconds)
        return Verdict(
            (culprit.rank,),
            f"{culprit.name} hangs {culprit.place}, at {culprit.line}: no progress for {culprit.seconds:.1f} s"
            f"{waiting}. Look at its stack above. {fix}",
        )
    if free:
        return Verdict((), "")
    if unreachable:
        own = reports[0]
        waits = f"{own.name} waits for {ranks_text(own.waits or ())} {own.place}"
        return Verdict(own.waits or (), f"{waits}: no progress for {own.seconds:.1f} s, and {unreachable}. {fix}")
    return Verdict((), f"no progress for {reports[0].seconds:.1f} s, and {_cycle(reports)}. Look at the stacks above.")


def late(reports: Sequence[RankReport], silent: Mapping[int, str]) -> str:
    """Where the ranks are that wait for no other one, the longest without progress first.

    Args:
        reports: of the ranks that answered; at least one.
        silent: a sentence about each rank that did not.
    """
    free = sorted((report for report in reports if not report.waits), key=lambda report: -report.seconds)
    words = [
        *silent.values(),
        *(f"{each.name} is {each.place}, at {each.line}, without progress for {each.seconds:.1f} s" for each in free),
    ]
    more = [f"{len(words) - _MOST_NOTICED} more ranks"] if len(words) > _MOST_NOTICED else []
    waiting = _waiting([report.rank for report in reports if report.waits]) if len(words) == 1 else ""
    return "; ".join([*words[:_MOST_NOTICED], *more]) + waiting or _cycle(reports)


def notice(reports: Sequence[RankReport], silent: Mapping[int, str], times: NoticeTimes) -> str:
    """Where the ranks are that make no progress, and when the watchdog ends the run; those that wait for none first.

    Empty where all others wait for a rank that makes progress.

    Args:
        reports: of the ranks that answered; at least one.
        silent: a sentence about each rank that did not.
        times: after how long without progress a rank counts as stuck.
    """
    stuck = [report for report in reports if times.is_stuck(report.seconds)]
    reached = _reached({report.rank: report for report in reports}, [report.rank for report in stuck])
    free = [report for report in reports if report.waits is None and report.rank in reached]
    lost = [silent[rank] for rank in silent if rank in reached or not free]
    if not stuck or (free and not lost and not any(report in stuck for report in free)):
        return ""
    stuck.sort(key=lambda report: (report.waits is not None, -report.seconds))
    words = [
        f"{report.name} {report.place} for {report.seconds:.0f} s, "
        + (f"waits for {ranks_text(report.waits)}" if report.waits else f"at {report.line}")
        for report in stuck[:_MOST_NOTICED]
    ]
    more = [f"{len(stuck) - len(words)} more ranks"] if len(stuck) > len(words) else []
    left = min(report.limit_seconds - report.seconds for report in stuck)
    ends = f". The watchdog ends the run after {left:.0f} s more without progress" if 0 < left < math.inf else ""
    return f"no progress: {'; '.join([*lost[:_MOST_NOTICED], *words, *more])}{ends}."


def _reached(reports: Mapping[int, RankReport], ranks: Iterable[int]) -> set[int]:
    """The ranks in which the waits of `ranks` end, and these ranks themselves."""
    found: set[int] = set()
    open_ranks = [*ranks]
    while open_ranks:
        rank = open_ranks.pop()
        if rank not in found:
            found.add(rank)
            open_ranks += (reports[rank].waits or ()) if rank in reports else ()
    return found


def _cycle(reports: Sequence[RankReport]) -> str:
    waits = "; ".join(f"rank {report.rank} waits for {ranks_text(report.waits or ())}" for report in reports[:8])
    return f"the ranks wait for each other: {waits}"


def _waiting(ranks: Sequence[int]) -> str:
    return f"; {ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} for it" if ranks else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks)}"
