"""`Conditions`: the times, latencies and memory that a schedule is made for, where it is made to measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What computing, sending and holding one micro-batch costs, stage by stage.

    Attributes:
        forward, backward_input, backward_weight: seconds of F, I and W on each stage.
        latency: ``latency[source][target]`` in seconds, from the end of a computation to its use on another rank.
        activation: for each stage, what F keeps, in any unit (bytes, or rank-shares of one micro-batch).
        weight_gradient: for each stage, what is left of it between I and W (M_W of the papers, where the whole is M_B).
        caps: for each rank, the most that it may hold, in the same unit; infinity where nothing limits it.
        overlap: seconds of an F and B that run as one unit, as a part of the sum of both.

    Raises:
        ScheduleError: lists of different lengths, a number that is negative or not one, or more kept after I than
            before.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: tuple[tuple[float, ...], ...]
    activation: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    caps: tuple[float, ...]
    overlap: float = 1.0

    def __post_init__(self) -> None:
        stages, ranks = len(self.forward), len(self.caps)
        for what in ("forward", "backward_input", "backward_weight", "activation", "weight_gradient"):
            values: tuple[float, ...] = getattr(self, what)
            if len(values) != stages:
                raise ScheduleError(f"{what} has {len(values)} numbers for {stages} stages: give one for each")
            _check_numbers(what, values)
        if len(self.latency) != ranks or any(len(row) != ranks for row in self.latency):
            raise ScheduleError(
                f"latency has rows of {[len(r) for r in self.latency]}: {ranks} ranks need {ranks} each"
            )
        for row in {id(row): row for row in self.latency}.values():  # a uniform one is a single row
            _check_numbers("latency", row)
        _check_numbers("overlap", (self.overlap,))
        if any(math.isnan(cap) or cap < 0 for cap in self.caps):
            raise ScheduleError(f"memory caps are {self.caps}: a cap is 0 or more; correct it")
        for stage, (kept, left) in enumerate(zip(self.activation, self.weight_gradient, strict=True)):
            if left > kept:
                raise ScheduleError(
                    f"stage {stage} keeps {left:g} after I and {kept:g} before: I frees; lower the first"
                )

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        latency: float = 0.0,
        weight_gradient: float = 1.0,
        memory_limit: float = math.inf,
    ) -> Conditions:
        """The same for every rank, in times of one rank's share and in rank-shares of one micro-batch.

        Args:
            placement: which ranks hold which stage; a stage takes 1/V of its rank's share with V chunks a rank.
            forward, backward_input, backward_weight: seconds of one rank's share.
            latency: seconds between any two ranks.
            weight_gradient: M_W/M_B, what is left between I and W as a fraction of what F keeps.
            memory_limit: for each rank, in rank-shares of one micro-batch.
        """
        stages, ranks = placement.num_stages, placement.num_ranks
        share = min(1.0, ranks / stages)
        return cls(
            forward=(forward * share,) * stages,
            backward_input=(backward_input * share,) * stages,
            backward_weight=(backward_weight * share,) * stages,
            latency=((latency,) * ranks,) * ranks,
            activation=(share,) * stages,
            weight_gradient=(weight_gradient * share,) * stages,
            caps=(memory_limit,) * ranks,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def num_ranks(self) -> int:
        return len(self.caps)


def peak_held(schedule: Schedule, conditions: Conditions) -> list[float]:
    """For each rank the most it holds: F keeps the activation, I leaves the weight gradient's part, W or B none."""
    split = schedule.split_backwards
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for stage, op, microbatch, piece in order:
            kept, left = conditions.activation[stage], conditions.weight_gradient[stage]
            if op is Op.F:
                held += kept
                peak = max(peak, held)
            elif op is Op.W:
                held -= left
            else:
                held -= kept - left if (stage, microbatch, piece) in split else kept
        peaks.append(peak)
    return peaks


def _check_numbers(what: str, values: Sequence[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise ScheduleError(f"{what} is {value}: it is a finite number, 0 or more; correct it")
