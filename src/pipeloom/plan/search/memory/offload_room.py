"""How many activations the ranks of a shape have room for, where others are offloaded. No torch here.

The slices of a micro-batch share keys and values, which stay on the device.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil

from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.memory.live_moments import Moment, Moments
from pipeloom.plan.search.memory.moment_bytes import Beside
from pipeloom.plan.search.shapes import Shape


class OffloadRoom:
    """Closed forms of memory with offload.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        moments: of its ranks.
        kept: for each kind of recomputation, bytes of an activation of every stage.
    """

    def __init__(
        self, costs: StepCosts, shape: Shape, moments: Moments, kept: Mapping[Recompute, Sequence[float]]
    ) -> None:
        self._costs, self._shape, self._moments = costs, shape, moments
        parts = [shared / shape.of.slices for shared in self._shared]
        self._kept = {
            kind: [max(0.0, size - part) for size, part in zip(sizes, parts, strict=True)] if any(parts) else sizes
            for kind, sizes in kept.items()
        }

    def number(self, beside: Beside, recompute: tuple[Recompute, ...], most: float) -> int | None:
        """The most activations that every rank has room for, of those that are smallest; None: for all.

        What waits for W counts, and stays.

        Args:
            beside: bytes beside activations.
            recompute: of every stage.
            most: bytes of a device.
        """
        kept = self._kept_by_stage(recompute)
        found: int | None = None
        for rank, moments in enumerate(self._moments):
            for at, moment in enumerate(moments):
                fit = _fitting(_live(moment, kept), most - self._beside(rank, at, beside, recompute))
                if fit is not None:
                    fit += sum(moment.waiting.values())
                    found = fit if found is None else min(found, fit)
        return found

    def least(self, beside: Beside, recompute: tuple[Recompute, ...]) -> float:
        """Bytes of the fullest rank in its largest computation, with no activation but the one that it reads."""
        kept = self._kept_by_stage(recompute)
        return max(
            self._beside(rank, at, beside, recompute) + (kept[moment.stage] if moment.op is not Op.W else 0.0)
            for rank, moments in enumerate(self._moments)
            for at, moment in enumerate(moments)
        )

    @cached_property
    def _shared(self) -> list[float]:
        """By stage, bytes of the keys and values of a micro-batch in slices."""
        of = self._shape.of
        if of.slices == 1:
            return [0.0] * of.stages
        model = self._costs.memory_model(of)
        return [model.slice_bytes(stage, of.slices)[0] for stage in range(of.stages)]

    def _kept_by_stage(self, recompute: tuple[Recompute, ...]) -> list[float]:
        return [self._kept[kind][stage] for stage, kind in enumerate(recompute)]

    def _beside(self, rank: int, at: int, beside: Beside, recompute: tuple[Recompute, ...]) -> float:
        """Bytes of a moment beside activations that can leave: those of slices share some that stay."""
        moment, size = self._moments[rank][at], beside.at(rank, at, recompute)
        if self._shape.of.slices > 1:
            size += sum(ceil(count / self._shape.of.slices) * self._shared[s] for s, count in moment.live.items())
        return size + sum(n * beside.stages[s].waiting(recompute[s]) for s, n in moment.waiting.items() if n)


def _live(moment: Moment, kept: Sequence[float]) -> list[tuple[float, int]]:
    """Bytes and number of the live activations of each stage, the smallest first."""
    return sorted((kept[stage], count) for stage, count in moment.live.items())


def _fitting(live: Sequence[tuple[float, int]], room: float) -> int | None:
    """How many of the live activations fit into `room` bytes, the smallest first; None: all."""
    fit = 0
    for size, count in live:
        if count * size > room:
            return fit + max(0, int(room // size))
        fit, room = fit + count, room - count * size
    return None
