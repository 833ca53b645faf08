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


def simulated_actions(of: Configuration) -> int:
    """Forwards and backwards that are simulated: of a short step, and of the shorter one with which it is compared."""
    number, group = short_microbatches(of, of.stages)
    both = number if number == of.microbatches else 2 * number - group
    return 2 * of.stages * of.slices * both


def order_number(of: Configuration) -> int | None:
    """A number of the order in which ranks compute, the same for schedules that have the same one.

    None where the order follows from costs, or a short step stands for `of`: there, others may differ.

    Raises:
        ScheduleError: the schedule does not support the sizes.
    """
    if schedules.find(of.schedule).to_measure or short_microbatches(of, of.stages)[0] < of.microbatches:
        return None
    return _order_number(of.schedule, of.pipeline, of.microbatches, of.chunks, of.slices)


@lru_cache(maxsize=4096)
def _order_number(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> int:
    schedule = schedule_of(name, ranks, microbatches, chunks, slices)
    return hash((schedule.placement, schedule.overlapped, tuple(map(tuple, schedule.orders))))


@lru_cache(maxsize=16)
def schedule_of(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    """The schedule of a family that builds it for no costs.

    Raises:
        ScheduleError: the family does not support the sizes.
    """
    family = schedules.find(name)
    number = None if family.chunks else chunks
    return family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices)
