"""The proof that a large schedule is legal, without loading numpy for small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.ir.schedule import Schedule

if TYPE_CHECKING:
    from pipeloom.ir.large.columns import Proof


def proof_of(schedule: Schedule) -> Proof | None:
    """The proof of a large schedule; None for small and for illegal schedules."""
    if not schedule.large:
        return None
    from pipeloom.ir.large.columns import prove

    return prove(schedule)
