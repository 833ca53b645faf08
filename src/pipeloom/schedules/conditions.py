"""`Conditions`: the times, latencies and memory that some schedules are optimized for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, Placement, Schedule

PER_STAGE = ("forward", "backward_input", "backward_weight", "activation", "weight_gradient")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Time, latency and memory of one micro-batch, per stage.

    Attributes:
        forward, backward_input, backward_weight: seconds of F, I and W on each stage.
        latency: ``latency[source][target]`` in seconds, from the end of a computation to its use on another rank.
        activation: for each stage, the size of F's activation, in any unit (bytes, or rank-shares of one micro-batch).
        weight_gradient: for each stage, the part of it that is left between I and W (M_W of the papers; the full size
            is M_B).
        caps: for each rank, the memory cap in the same unit; infinity for no limit.
        overlap: seconds of an overlapped F and B, as a fraction of their sum.

    Raises:
        ScheduleError: tuples of wrong lengths, a negative or non-finite number, or more memory after I than before.
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
        for what in PER_STAGE:
            values: tuple[float, ...] = getattr(self, what)
            if len(values) != stages:
                raise ScheduleError(f"{what} has {len(values)} entries for {stages} stages: must have one per stage.")
            _check_numbers(what, values)
        if len(self.latency) != ranks or any(len(row) != ranks for row in self.latency):
            raise ScheduleError(
                f"latency has rows of {[len(r) for r in self.latency]} entries: must be a {ranks} x {ranks} table."
            )
        for row in {id(row): row for row in self.latency}.values():  # a uniform one is a single row
            _check_numbers("latency", row)
        _check_numbers("overlap", (self.overlap,))
        if any(math.isnan(cap) or cap < 0 for cap in self.caps):
            raise ScheduleError(f"caps={self.caps}: a memory cap must be at least 0.")
        for stage, (kept, left) in enumerate(zip(self.activation, self.weight_gradient, strict=True)):
            if left > kept:
                raise ScheduleError(
                    f"weight_gradient[{stage}]={left:g}: must be at most activation[{stage}]={kept:g}: what remains "
                    "for W (the backward of the weights) is a part of what F (the forward) kept. Lower "
                    f"weight_gradient[{stage}]."
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
    ) -> Self:
        """Equal conditions on all ranks, per rank-share of one micro-batch.

        Args:
            placement: which ranks hold which stage; with V virtual stages per rank a stage is 1/V of a rank's share.
            forward, backward_input, backward_weight: seconds of one rank's share.
            latency: seconds between any two ranks.
            weight_gradient: M_W/M_B, the fraction of the activation that is left between I and W.
            memory_limit: the cap of each rank, in rank-shares of one micro-batch.
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
    """For each rank, peak memory: F keeps the activation, I leaves the weight gradient's part, W or B frees all."""
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
            raise ScheduleError(f"{what}={value}: must be a finite number >= 0.")
