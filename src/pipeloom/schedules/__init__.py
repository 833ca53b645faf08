"""One file per family of schedules, and the table that lists them.

To add a schedule: write a pure function that returns a `Schedule`, and add one `Family` row below. The checker, the
simulator, the executor, the pictures and the command line take it from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.naive import naive
from pipeloom.schedules.one_f_one_b import one_f_one_b

__all__ = ["FAMILIES", "Family", "build", "gpipe", "naive", "one_f_one_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table of schedules.

    Attributes:
        name: as on the command line.
        paper: where it comes from.
        constraints: what p, m and v have to satisfy, in words.
        bubble: closed form of the idle fraction for uniform stages without latency, in p, m, v.
        peak: closed form of the peak of live activations on rank d, in rank-shares of one micro-batch.
        build: the function; takes ``num_ranks`` and ``num_microbatches``, and ``num_chunks`` where `has_chunks`.
        has_chunks: whether a rank may hold several stages.
    """

    name: str
    paper: str
    constraints: str
    bubble: str
    peak: str
    build: Callable[..., Schedule]
    has_chunks: bool = False


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="naive",
            paper="naive model parallelism",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/p",
            peak="1",
            build=naive,
        ),
        Family(
            name="gpipe",
            paper="GPipe, arXiv:1811.06965",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/(m+p-1)",
            peak="m",
            build=gpipe,
        ),
        Family(
            name="1f1b",
            paper="PipeDream-Flush, arXiv:2006.09503",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/(m+p-1)",
            peak="min(p-d, m)",
            build=one_f_one_b,
        ),
    )
}


def build(name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule `name` of the table for these sizes.

    Raises:
        ScheduleError: unknown name, or sizes that the family cannot have.
    """
    family = FAMILIES.get(name)
    if family is None:
        close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else "see `pipeloom schedules`"
        raise ScheduleError(f"schedule {name!r} is unknown: the schedules are {', '.join(FAMILIES)}; {hint}")
    for value, what in ((num_ranks, "ranks"), (num_microbatches, "micro-batches"), (num_chunks, "chunks")):
        if value < 1:
            raise ScheduleError(f"{value} {what}: a pipeline needs at least 1; raise it")
    if not family.has_chunks:
        if num_chunks != 1:
            raise ScheduleError(f"{num_chunks} chunks: schedule {name!r} holds one stage a rank; leave chunks at 1")
        return family.build(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return family.build(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
