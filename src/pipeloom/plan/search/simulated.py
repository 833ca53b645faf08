"""Seconds and memory of a configuration: simulated, or for a long step extrapolated from two short ones. No torch here.

A synchronous schedule has a warm-up, a steady state that every further group of micro-batches makes longer by the same
time, and a cool-down. So a step of m micro-batches takes

    T(m) = T(b) + (m - b) / g * (T(b) - T(b - g))    for b >= 3 p, b = m modulo g, g = p

and memory, which grows with m in schedules such as gpipe, follows in the same way.
"""

from dataclasses import dataclass, replace
from math import lcm

from pipeloom.ir import Program
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.memory import memory_of_ranks
from pipeloom.sim import Timeline, simulate

_MOST_ACTIONS = 6_000  # forwards and backwards of all ranks of a step that is simulated as a whole
_WARM_UP = 3  # times the ranks: micro-batches of a short step


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A configuration with its prediction.

    Attributes:
        of: the configuration.
        step_seconds: of a step.
        update_seconds: of the optimizer's update.
        peak_bytes: of every rank.
        busy_seconds: of computations, mean of the ranks.
        data_seconds: that data parallelism makes the step longer.
        timeline: of the longest step that was simulated.
    """

    of: Configuration
    step_seconds: float
    update_seconds: float
    peak_bytes: tuple[float, ...]
    busy_seconds: float
    timeline: Timeline


def short_microbatches(of: Configuration, stages: int) -> tuple[int, int]:
    """Micro-batches of a step that stands for `of`, and of a group; the first is that of `of` where it is short."""
    group = lcm(of.pipeline, 2)
    actions = 2 * stages * of.slices
    least = max(_WARM_UP * of.pipeline, 2 * group)
    if actions * of.microbatches <= _MOST_ACTIONS or of.microbatches < least + group:
        return of.microbatches, group
    return of.microbatches - (of.microbatches - least) // group * group, group


def simulated(costs: CostModel, of: Configuration, *, whole: bool = False) -> Simulated:
    """Simulate a step.

    Args:
        costs: of the model on its cluster.
        of: the configuration, with `blocks`.
        whole: whether to simulate all micro-batches.

    Raises:
        InputError, ScheduleError: sizes that do not fit.
    """
    number, group = short_microbatches(of, of.stages)
    if whole:
        number = of.microbatches
    seconds, peaks, timeline, program = _step(costs, of, number)
    if number < of.microbatches:
        before, lower_peaks, *_ = _step(costs, of, number - group)
        times = (of.microbatches - number) // group
        seconds += times * (seconds - before)
        peaks = [peak + times * max(0.0, peak - less) for peak, less in zip(peaks, lower_peaks, strict=True)]
    update = costs.update_seconds(of, program.placement.stages_of)
    return Simulated(
        of=of,
        step_seconds=seconds + update,
        update_seconds=update,
        peak_bytes=tuple(peaks),
        busy_seconds=timeline.ideal_seconds * of.microbatches / number,
        timeline=timeline,
    )


def _step(costs: CostModel, of: Configuration, microbatches: int) -> tuple[float, list[float], Timeline, Program]:
    short = replace(of, microbatches=microbatches)
    program = costs.program(short)
    timeline = simulate(program, costs.costs(short), costs.network(short))
    peaks = [rank.peak for rank in memory_of_ranks(program, costs.memory_model(short))]
    return timeline.makespan, peaks, timeline, program
