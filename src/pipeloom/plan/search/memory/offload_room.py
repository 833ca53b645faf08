"""How many activations the ranks of a shape have room for, where others are offloaded. No torch here.

The slices of a micro-batch share keys and values, which stay on the device. So does what waits for W.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import NamedTuple

from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.memory.live_moments import Moments
from pipeloom.plan.search.memory.moment_bytes import Beside
from pipeloom.plan.search.space.shapes import Shape


class _Held(NamedTuple):
    """What a rank holds at a moment.

    Attributes:
        staying: bytes that cannot leave.
        waiting: number of activations that wait for W.
        own: bytes of the activation that the computation reads, or makes.
        live: bytes and number of the activations of each stage, the smallest first.
    """

    staying: float
    waiting: int
    own: float
    live: Sequence[tuple[float, int]]


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
        self._of_recompute: dict[tuple[Recompute, ...], list[list[_Held]]] = {}

    def number(self, beside: Beside, recompute: tuple[Recompute, ...], most: float) -> int | None:
        """The most activations that every rank has room for, of those that are smallest; None: for all.

        Args:
            beside: bytes beside activations.
            recompute: of every stage.
            most: bytes of a device.
        """
        found: int | None = None
        for sizes, moments in zip(beside.of(recompute), self._held(beside, recompute), strict=True):
            for size, held in zip(sizes, moments, strict=True):
                fit = _fitting(held.live, most - size - held.staying)
                if fit is not None:
                    found = fit + held.waiting if found is None else min(found, fit + held.waiting)
        return found

    def least(self, beside: Beside, recompute: tuple[Recompute, ...]) -> float:
        """Bytes of the fullest rank in its largest computation, with no activation but the one that it reads."""
        return max(
            size + held.staying + held.own
            for sizes, moments in zip(beside.of(recompute), self._held(beside, recompute), strict=True)
            for size, held in zip(sizes, moments, strict=True)
        )

    @cached_property
    def _shared(self) -> list[float]:
        """By stage, bytes of the keys and values of a micro-batch in slices."""
        of = self._shape.of
        if of.slices == 1:
            return [0.0] * of.stages
        model = self._costs.memory_model(of)
        return [model.slice_bytes(stage, of.slices)[0] for stage in range(of.stages)]

    def _held(self, beside: Beside, recompute: tuple[Recompute, ...]) -> list[list[_Held]]:
        """What each rank holds at its moments, with any data strategy."""
        if recompute not in self._of_recompute:
            kept = [self._kept[kind][stage] for stage, kind in enumerate(recompute)]
            waiting = [beside.stages[stage].waiting(kind) for stage, kind in enumerate(recompute)]
            slices = self._shape.of.slices
            self._of_recompute[recompute] = [
                [
                    _Held(
                        staying=sum(count * waiting[stage] for stage, count in moment.waiting.items())
                        + sum(ceil(count / slices) * self._shared[stage] for stage, count in moment.live.items()),
                        waiting=sum(moment.waiting.values()),
                        own=kept[moment.stage] if moment.op is not Op.W else 0.0,
                        live=sorted((kept[stage], count) for stage, count in moment.live.items() if count),
                    )
                    for moment in moments
                ]
                for moments in self._moments
            ]
        return self._of_recompute[recompute]


def _fitting(live: Sequence[tuple[float, int]], room: float) -> int | None:
    """How many of the live activations fit into `room` bytes, the smallest first; None: all."""
    fit = 0
    for size, count in live:
        if count * size > room:
            return fit + max(0, int(room // size))
        fit, room = fit + count, room - count * size
    return None
