"""Seconds and memory of a configuration: simulated, or for a long step extrapolated from two short ones. No torch here.

A synchronous schedule has a warm-up, a steady state that every further group of micro-batches makes longer by the same
time, and a cool-down. So a step of m micro-batches takes

    T(m) = T(b) + (m - b) / g * (T(b) - T(b - g))    for b >= 3 p, b = m modulo g, g = p

The steady state may begin later: a rank that computes more than others falls behind only little by little. So a step
takes no less than any rank needs, which waits before its first computation and after its last one as in the short step,
and no less than any of its links. The short steps of plans that are kept grow until the last two groups take equally
long.
Memory grows in the same way where ranks hold more activations, as with gpipe; elsewhere it stays. A schedule that holds
more and more activations, and offloads them, is simulated as a whole.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from operator import add
from typing import TypeVar

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Program
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.rank_memory import RankPeaks
from pipeloom.plan.search.memory.live_moments import live_growth
from pipeloom.plan.search.memory.memory_choice import MemoryChoices
from pipeloom.plan.search.memory.stage_bytes import KnownBytes
from pipeloom.plan.search.short_steps import schedule_of, short_microbatches
from pipeloom.plan.search.space.shapes import KnownShapes
from pipeloom.sim import Timeline
from pipeloom.sim.simulator import StepSeconds

T = TypeVar("T")

_UNSTEADY = 2e-3  # of the time of a group of micro-batches: it changes by less where the steady state has begun
_MOST_ACTIONS = 60_000  # of a short step that grows until it has
_KEPT = 16  # programs
_OF_MEMORY = 0.4  # of the time that a candidate takes: its program and its memory


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
        step: which was simulated.
    """

    of: Configuration
    schedule_limit: float | None = None
    step_seconds: float
    update_seconds: float
    peak_bytes: tuple[float, ...]
    makespan: float
    busy_seconds: float
    step: "Step" = field(repr=False, compare=False)

    @property
    def peak(self) -> float:
        """Peak bytes of the rank that needs most."""
        return max(self.peak_bytes)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the longest step that was simulated."""
        return self.step.timeline()

    def settled(self) -> "Simulated":
        """This one, or that of a longer short step, where the steady state had not begun in the short one."""
        step = self.step.settled()
        return self if step is self.step else step.simulated(self.peak_bytes)


class Steps:
    """Steps of one model on one cluster, with what configurations share: nothing is computed twice.

    Args:
        costs: of the model on its cluster.

    Attributes:
        work: forwards and backwards that were simulated; those whose memory alone was predicted count in part.
        known_bytes: of stages.
        shapes: of configurations.
        memory: what stages recompute and offload, by all that it depends on, on few devices.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.work = costs, 0.0
        self.known_bytes = KnownBytes()
        self.shapes = KnownShapes()
        self.memory: dict[Hashable, MemoryChoices] = {}
        self._lowered: dict[Hashable, Program] = {}
        self._programs: dict[Hashable, Program] = {}
        self._peaks: dict[Hashable, tuple[float, ...]] = {}
        self._seconds: dict[Hashable, StepSeconds] = {}

    def program(self, of: Configuration, limit: float | None) -> Program:
        """What every replica runs. Raises ScheduleError where the schedule does not support the sizes."""
        costs = self.costs

        if schedules.find(of.schedule).to_measure:
            return costs.program(of, costs.schedule(of, limit))
        sizes = of.schedule, of.pipeline, of.microbatches, of.chunks, of.slices
        key = sizes, of.data_axis()
        before = _kept(self._lowered, key, lambda: costs.lowered(of, schedule_of(*sizes)))
        return _kept(self._programs, (key, of.offload), lambda: costs.offloading(of, before))

    def peaks(self, of: Configuration, limit: float | None, find: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Peak memory of every rank, which the order of the mesh axes does not change."""
        key = of._replace(order=ORDER), limit
        if schedules.find(of.schedule).to_measure:
            return find()
        if key not in self._peaks:
            self._peaks[key] = find()
        return self._peaks[key]

    def seconds(self, of: Configuration, limit: float | None, *, replicas: bool) -> StepSeconds:
        """Seconds of a step without the update.

        Args:
            of: the configuration.
            limit: of the schedule, see `Simulated`.
            replicas: whether data parallelism takes time.
        """
        key = of, limit, replicas
        if schedules.find(of.schedule).to_measure or key not in self._seconds:
            network = self.costs.network(of)
            if not replicas:
                network = replace(
                    network, data_bytes_per_second=None, data_sum_bytes_per_second=None, data_latency_seconds=0.0
                )
            self._seconds[key] = self.costs.seconds(of, self.program(of, limit), network)
        return self._seconds[key]


def _kept(known: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The value of a key, which is made where it is not among the last ones that were asked for."""
    known[key] = value = known.pop(key) if key in known else make()
    if len(known) > _KEPT:
        del known[next(iter(known))]
    return value


class Step:
    """One step of a configuration.

    Args:
        steps: what it shares with others.
        of: the configuration, with `blocks`.
        schedule_limit: see `Simulated`.
        microbatches: of the short step; default: few.

    Raises:
        InputError, ScheduleError: sizes that do not fit.
    """

    def __init__(
        self,
        steps: Steps,
        of: Configuration,
        schedule_limit: float | None = None,
        *,
        microbatches: int | None = None,
    ) -> None:
        self._steps, self._costs, self._of, self._limit = steps, steps.costs, of, schedule_limit
        number, group = short_microbatches(of, of.stages)
        if of.offload is not None and number < of.microbatches and any(live_growth(of)):
            number = of.microbatches  # what is offloaded of a short step says little where more and more is
        number = number if microbatches is None else microbatches
        self._times = (of.microbatches - number) // group  # of the group, beside the short step
        self._short = of._replace(microbatches=number)
        self._shorter = of._replace(microbatches=number - group)

    def _program(self, of: Configuration) -> Program:
        return self._steps.program(of, self._limit)

    @property
    def actions(self) -> int:
        """Forwards and backwards that are simulated."""
        both = self._short.microbatches + (self._shorter.microbatches if self._times else 0)
        return 2 * self._of.stages * self._of.slices * both

    def peaks(self) -> tuple[float, ...]:
        """Peak memory of every rank."""
        return self._steps.peaks(self._of, self._limit, self._peaks)

    def _peaks(self) -> tuple[float, ...]:
        self._steps.work += _OF_MEMORY * self.actions
        program = self._program(self._short)
        ranks = RankPeaks(program, self._costs.memory_model(self._short), self._steps.known_bytes.units)
        found = ranks.of(program)
        if self._times:
            less = ranks.of(self._program(self._shorter))
            grows = live_growth(self._of)
            found = [
                peak + self._times * (peak - other if more else 0.0)
                for peak, other, more in zip(found, less, grows, strict=True)
            ]
        return tuple(found)

    def simulated(self, peaks: tuple[float, ...]) -> Simulated:
        """The configuration with its seconds and these peaks."""
        self._steps.work += (1 - _OF_MEMORY) * self.actions
        seconds, busy = self._makespan()
        placement = self._program(self._short).placement
        update = self._costs.update_seconds(self._of, placement.stages_of)
        shared = self._costs.shared_sum_seconds(self._of, placement)
        return Simulated(
            of=self._of,
            schedule_limit=self._limit,
            step_seconds=seconds + shared + update,
            update_seconds=update,
            peak_bytes=peaks,
            makespan=seconds,
            busy_seconds=busy,
            step=self,
        )

    def settled(self) -> "Step":
        """This step, or that with more micro-batches in its short step whose steady state has begun there."""
        step = self
        if schedules.find(self._of.schedule).to_measure:  # each short step has an order of its own
            return self
        while step._times and not step._is_steady and step.actions < _MOST_ACTIONS:
            number, group = step._short.microbatches, step._short.microbatches - step._shorter.microbatches
            more = number + group * min(step._times, number // group)
            step = Step(self._steps, self._of, self._limit, microbatches=more)
        return step

    @property
    def _is_steady(self) -> bool:
        """Whether the last two groups of micro-batches of the short step took equally long."""
        number, less = self._short.microbatches, self._shorter.microbatches
        if 2 * less <= number:
            return False
        least = self._of._replace(microbatches=2 * less - number)
        try:
            steps = [self._steps.seconds(of, self._limit, replicas=True) for of in (self._short, self._shorter, least)]
        except ScheduleError:  # the least has too few micro-batches
            return False
        whole, before, first = (step.makespan for step in steps)
        return abs(whole - before - (before - first)) <= _UNSTEADY * (whole - before)

    def without_replicas(self) -> float:
        """Seconds of the step, without the update, where data parallelism communicates in no time."""
        return self._makespan(replicas=False)[0]

    def timeline(self) -> Timeline:
        """The timeline of the longest step that is simulated."""
        return self._costs.timeline(self._short, self._program(self._short))

    def _makespan(self, *, replicas: bool = True) -> tuple[float, float]:
        """Seconds of the step, without the update, and of its computations, mean of the ranks."""
        short = self._steps.seconds(self._short, self._limit, replicas=replicas)
        if not self._times:
            return short.makespan, short.ideal
        less = self._steps.seconds(self._shorter, self._limit, replicas=replicas)

        def longer(seconds: float, before: float) -> float:
            return seconds + self._times * (seconds - before)

        at_least = map(add, map(longer, short.busy, less.busy), short.outside)
        return max(longer(short.makespan, less.makespan), *at_least), longer(short.ideal, less.ideal)


def simulated(costs: StepCosts, of: Configuration, *, whole: bool = False) -> Simulated:
    """Simulate a step, all its micro-batches where it is `whole`.

    Raises:
        InputError, ScheduleError: sizes that do not fit.
    """
    step = Step(Steps(costs), of, microbatches=of.microbatches if whole else None)
    return step.simulated(step.peaks()).settled()
