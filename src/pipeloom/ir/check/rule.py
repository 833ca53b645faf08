"""`Rule`: what must hold of a schedule or program, in one sentence, and how to find where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Program, Schedule

Breaches = Iterator[tuple[str, str]]  # what breaks the rule, and the fix


@dataclass(frozen=True)
class Rule:
    """One rule of schedules, of programs, or of both.

    Attributes:
        sentence: what must hold; errors quote it.
        breaches: yields what breaks it; may rely on all rules before its own.
    """

    sentence: str
    breaches: Callable[[Any], Breaches]

    @property
    def name(self) -> str:
        return self.breaches.__name__

    def ask(self, pipeline: Schedule | Program) -> None:
        """Raises ScheduleError, with the first breach, the rule and the fix on one line, if there is a breach."""
        for what, fix in self.breaches(pipeline):
            kind = "program" if pipeline.lowered else "schedule"
            raise ScheduleError(f"{kind} {pipeline.name!r}: {what}: {self.sentence}. {fix}.")


def rule(sentence: str) -> Callable[[Callable[[Any], Breaches]], Rule]:
    """Make a `Rule` of the function that finds its breaches."""
    return lambda breaches: Rule(sentence, breaches)


def at(action: Action, rank: int) -> str:
    return f"{action} on rank {rank}"
