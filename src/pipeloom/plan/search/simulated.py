"""Seconds and memory of a configuration: simulated, or for a long step extrapolated from two short ones. No torch here.

A synchronous schedule has a warm-up, a steady state that every further group of micro-batches makes longer by the same
time, and a cool-down. So a step of m micro-batches takes

    T(m) = T(b) + (m - b) / g * (T(b) - T(b - g))    for b >= 3 p, b = m modulo g, g = p

and memory, which grows with m in schedules such as gpipe, follows in the same way.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

from pipeloom.ir import Program, Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory import memory_of_ranks
from pipeloom.sim import Timeline

_MOST_ACTIONS = 6_000  # forwards and backwards of all ranks of a step that is simulated as a whole
_LEAST_GROWTH = 1e-5  # of a peak; less is that of another backward of the steady state
_WARM_UP = 3  # times the ranks: micro-batches of a short step


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A configuration with its prediction.

    Attributes:
        of: the configuration.
        schedule_limit: activations of a rank, in shares of one rank on one micro-batch, that the schedule was built
            for; None: any number.
        step_seconds: of a step.
        update_seconds: of the optimizer's update.
        peak_bytes: of every rank.
        makespan: of a step, without the update.
        busy_seconds: of computations, mean of the ranks.
        timeline: of the longest step that was simulated.
        step: which was simulated.
    """

    of: Configuration
    schedule_limit: float | None = None
    step_seconds: float
    update_seconds: float
    peak_bytes: tuple[float, ...]
    makespan: float
    busy_seconds: float
    timeline: Timeline
    step: "Step" = field(repr=False, compare=False)

    @property
    def peak(self) -> float:
        """Of the rank that needs most."""
        return max(self.peak_bytes)


def short_microbatches(of: Configuration, stages: int) -> tuple[int, int]:
    """Micro-batches of a step that stands for `of`, and of a group; the first is that of `of` where it is short."""
    group = lcm(of.pipeline, 2)
    actions = 2 * stages * of.slices
    least = max(_WARM_UP * of.pipeline, 2 * group)
    if actions * of.microbatches <= _MOST_ACTIONS or of.microbatches < least + group:
        return of.microbatches, group
    return of.microbatches - (of.microbatches - least) // group * group, group


class Step:
    """One step of a configuration.

    Args:
        costs: of the model on its cluster.
        of: the configuration, with `blocks`.
        schedule_limit: see `Simulated`.
        whole: whether to simulate all micro-batches.

    Raises:
        InputError, ScheduleError: sizes that do not fit.
    """

    def __init__(
        self, costs: StepCosts, of: Configuration, schedule_limit: float | None = None, *, whole: bool = False
    ) -> None:
        self._costs, self._of, self._limit = costs, of, schedule_limit
        number, group = short_microbatches(of, of.stages)
        number = of.microbatches if whole else number
        self._times = (of.microbatches - number) // group  # of the group, beside the short step
        self._short = replace(of, microbatches=number)
        self._shorter = replace(of, microbatches=number - group)

    def _scheduled(self, of: Configuration) -> Schedule:
        return self._costs.schedule(of, self._limit)

    @property
    def actions(self) -> int:
        """Forwards and backwards that are simulated."""
        both = self._short.microbatches + (self._shorter.microbatches if self._times else 0)
        return 2 * self._of.stages * self._of.slices * both

    @cached_property
    def _program(self) -> Program:
        return self._costs.program(self._short, self._scheduled(self._short))

    @cached_property
    def _shorter_program(self) -> Program:
        return self._costs.program(self._shorter, self._scheduled(self._shorter))

    def peaks(self) -> tuple[float, ...]:
        """Peak memory of every rank."""
        found = self._peaks(self._short, self._program)
        if self._times:
            less = self._peaks(self._shorter, self._shorter_program)
            growth = [peak - other for peak, other in zip(found, less, strict=True)]
            found = [
                peak + self._times * (more if more > _LEAST_GROWTH * peak else 0.0)
                for peak, more in zip(found, growth, strict=True)
            ]
        return tuple(found)

    def _peaks(self, of: Configuration, program: Program) -> list[float]:
        return [rank.peak for rank in memory_of_ranks(program, self._costs.memory_model(of))]

    def simulated(self, peaks: tuple[float, ...]) -> Simulated:
        """With its seconds."""
        timeline = self._timeline(self._short, self._program)
        seconds = timeline.makespan
        if self._times:
            less = self._timeline(self._shorter, self._shorter_program).makespan
            seconds += self._times * (timeline.makespan - less)
        update = self._costs.update_seconds(self._of, self._program.placement.stages_of)
        shared = self._costs.shared_sum_seconds(self._of, self._program.placement)
        return Simulated(
            of=self._of,
            schedule_limit=self._limit,
            step_seconds=seconds + shared + update,
            update_seconds=update,
            peak_bytes=peaks,
            makespan=seconds,
            busy_seconds=timeline.ideal_seconds * self._of.microbatches / self._short.microbatches,
            timeline=timeline,
            step=self,
        )

    def _timeline(self, of: Configuration, program: Program, *, replicas: bool = True) -> Timeline:
        network = self._costs.network(of)
        if not replicas:
            network = replace(
                network, data_bytes_per_second=None, data_sum_bytes_per_second=None, data_latency_seconds=0.0
            )
        return self._costs.timeline(of, program, None, network)

    def without_replicas(self) -> float:
        """Seconds of the step, without the update, where data parallelism communicates in no time."""
        seconds = self._timeline(self._short, self._program, replicas=False).makespan
        if self._times:
            less = self._timeline(self._shorter, self._shorter_program, replicas=False).makespan
            seconds += self._times * (seconds - less)
        return seconds


def simulated(costs: StepCosts, of: Configuration, *, whole: bool = False) -> Simulated:
    """Simulate a step. Raises InputError or ScheduleError for sizes that do not fit."""
    step = Step(costs, of, whole=whole)
    return step.simulated(step.peaks())
