"""How many activations the ranks of a shape have room for, where others are offloaded. No torch here.

The slices of a micro-batch share keys and values, which stay on the device.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil

from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.stage_moments import StageGradients, stage_moments
from pipeloom.plan.search.memory.live_moments import Moment, Moments
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
        self._of_kinds: dict[Recompute, list[float]] = {}
        self._of_stages: dict[tuple[Recompute, ...], tuple[list[float], list[float]]] = {}

    def number(self, fixed: Sequence[Sequence[float]], recompute: tuple[Recompute, ...], most: float) -> int | None:
        """The most activations that every rank has room for, of those that are smallest; None: for all.

        Args:
            fixed: bytes beside activations, by rank and moment.
            recompute: of every stage.
            most: bytes of a device.
        """
        if self.least(fixed, recompute) > most:
            return 0
        kept, inside = self._bytes_of_stages(recompute)
        found: int | None = None
        for rank, sizes in enumerate(fixed):
            for size, moment in zip(sizes, self._moments[rank], strict=True):
                fit = _fitting(_live(moment, kept), most - self._beside(size, moment, inside))
                if fit is not None:
                    found = fit if found is None else min(found, fit)
        return found

    def least(self, fixed: Sequence[Sequence[float]], recompute: tuple[Recompute, ...]) -> float:
        """Bytes of the fullest rank in its largest computation, with no activation but the one that it reads."""
        kept, inside = self._bytes_of_stages(recompute)
        most = 0.0
        for sizes, moments, stages in zip(fixed, self._moments, self._shape.placement.stages_of, strict=True):
            most = max(most, min(sizes) + max(kept[stage] + inside[stage] for stage in stages))
            for size, moment in zip(sizes, moments, strict=True):
                most = max(most, self._beside(size, moment, inside) + kept[moment.stage])
        return most

    def bytes(self, fixed: Sequence[Sequence[float]], recompute: tuple[Recompute, ...], number: int) -> float:
        """Bytes of the fullest rank that keeps `number` activations, the smallest ones."""
        most = self.least(fixed, recompute)
        kept, inside = self._bytes_of_stages(recompute)
        for rank, sizes in enumerate(fixed):
            for size, moment in zip(sizes, self._moments[rank], strict=True):
                held, left = self._beside(size, moment, inside), number
                for each, count in _live(moment, kept):
                    held += min(left, count) * each
                    left -= min(left, count)
                most = max(most, held)
        return most

    @cached_property
    def _shared(self) -> list[float]:
        """By stage, bytes of the keys and values of a micro-batch in slices."""
        of = self._shape.of
        if of.slices == 1:
            return [0.0] * of.stages
        model = self._costs.memory_model(of)
        return [model.slice_bytes(stage, of.slices)[0] for stage in range(of.stages)]

    def _bytes_of_stages(self, recompute: tuple[Recompute, ...]) -> tuple[list[float], list[float]]:
        """By stage, bytes of an activation, and `_inside`."""
        if recompute not in self._of_stages:
            kept = [self._kept[kind][stage] for stage, kind in enumerate(recompute)]
            self._of_stages[recompute] = kept, [self._inside(kind)[stage] for stage, kind in enumerate(recompute)]
        return self._of_stages[recompute]

    def _beside(self, size: float, moment: Moment, inside: Sequence[float]) -> float:
        """Bytes of a moment beside activations that can leave: `size`, what slices share, and what is computed."""
        if self._shape.of.slices > 1:
            size += sum(ceil(count / self._shape.of.slices) * self._shared[s] for s, count in moment.live.items())
        return size + (inside[moment.stage] if moment.op is not Op.W else 0.0)

    def _inside(self, kind: Recompute) -> list[float]:
        """Bytes of each stage inside a forward or backward, beside activations at its start and gradients."""
        if kind not in self._of_kinds:
            model = self._costs.memory_model(self._shape.of._replace(recompute=kind))
            found: list[float] = []
            known: dict[tuple[int, ...], float] = {}  # of layers that are alike, and share the table of what they keep
            for stage, layers in enumerate(model.stages):
                alike = tuple(id(layer.kept_bytes) for layer in layers)
                if alike not in known:
                    nothing = [0.0] * len(layers)
                    gradients = StageGradients(nothing, nothing, None, nothing)
                    moments = stage_moments(model, stage, 0, self._shape.of.slices, gradients)
                    known[alike] = max(moments.inputs, moments.forward)
                found.append(known[alike])
            self._of_kinds[kind] = found
        return self._of_kinds[kind]


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
