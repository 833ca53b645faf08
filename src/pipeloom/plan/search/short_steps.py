"""Short steps, which stand for long ones, and their schedules. No torch here."""

from functools import lru_cache
from math import lcm

from pipeloom import schedules
from pipeloom.ir import Schedule
from pipeloom.plan.costs.configuration import Configuration

_MOST_ACTIONS = 6_000  # forwards and backwards of all ranks of a step that is simulated as a whole
_WARM_UP = 3  # times the ranks: micro-batches of a short step


def short_microbatches(of: Configuration, stages: int) -> tuple[int, int]:
    """Micro-batches of a step that stands for `of`, and of a group; the first is that of `of` where it is short."""
    group = lcm(of.pipeline, 2)
    actions = 2 * stages * of.slices
    least = max(_WARM_UP * of.pipeline, 2 * group)
    if actions * of.microbatches <= _MOST_ACTIONS or of.microbatches < least + group:
        return of.microbatches, group
    return of.microbatches - (of.microbatches - least) // group * group, group


@lru_cache(maxsize=16)
def schedule_of(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    """The schedule of a family that builds it for no costs.

    Raises:
        ScheduleError: the family does not support the sizes.
    """
    family = schedules.find(name)
    number = None if family.chunks else chunks
    return family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices)
