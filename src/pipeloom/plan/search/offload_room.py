"""How many activations the ranks of a shape have room for, where others are offloaded. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.stage_moments import StageGradients, stage_moments
from pipeloom.plan.search.live_moments import Moment, Moments
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
        self._costs, self._shape, self._moments, self._kept = costs, shape, moments, kept
        self._of_kinds: dict[Recompute, list[float]] = {}

    def number(self, fixed: Sequence[Sequence[float]], recompute: Sequence[Recompute], most: float) -> int | None:
        """The most activations that every rank has room for, of those that are smallest; None: for all.

        Args:
            fixed: bytes beside activations, by rank and moment.
            recompute: of every stage.
            most: bytes of a device.
        """
        if self.least(fixed, recompute) > most:
            return 0
        found: int | None = None
        for rank, sizes in enumerate(fixed):
            for size, moment in zip(sizes, self._moments[rank], strict=True):
                fit = self._fitting(moment, recompute, most - size - self._at(moment, recompute))
                if fit is not None:
                    found = fit if found is None else min(found, fit)
        return found

    def least(self, fixed: Sequence[Sequence[float]], recompute: Sequence[Recompute]) -> float:
        """Bytes of the fullest rank in its largest computation, with no activation but the one that it reads."""
        return max(
            min(sizes) + max(self._kept[recompute[s]][s] + self._inside(recompute[s])[s] for s in stages)
            for sizes, stages in zip(fixed, self._shape.placement.stages_of, strict=True)
        )

    def bytes(self, fixed: Sequence[Sequence[float]], recompute: Sequence[Recompute], number: int) -> float:
        """Bytes of the fullest rank that keeps `number` activations, the smallest ones."""
        most = self.least(fixed, recompute)
        for rank, sizes in enumerate(fixed):
            for size, moment in zip(sizes, self._moments[rank], strict=True):
                held = size + self._at(moment, recompute)
                left = number
                for each, count in self._live(moment, recompute):
                    held += min(left, count) * each
                    left -= min(left, count)
                most = max(most, held)
        return most

    def _live(self, moment: Moment, recompute: Sequence[Recompute]) -> list[tuple[float, int]]:
        """Bytes and number of the live activations of each stage, the smallest first."""
        return sorted((self._kept[recompute[stage]][stage], count) for stage, count in moment.live.items())

    def _at(self, moment: Moment, recompute: Sequence[Recompute]) -> float:
        """Bytes inside the computation of a moment."""
        return self._inside(recompute[moment.stage])[moment.stage] if moment.op is not Op.W else 0.0

    def _fitting(self, moment: Moment, recompute: Sequence[Recompute], room: float) -> int | None:
        """How many of the live activations fit into `room` bytes, the smallest first; None: all."""
        fit = 0
        for size, count in self._live(moment, recompute):
            if count * size > room:
                return fit + max(0, int(room // size))
            fit, room = fit + count, room - count * size
        return None

    def _inside(self, kind: Recompute) -> list[float]:
        """Bytes of each stage inside a forward or backward, beside activations at its start and gradients."""
        if kind not in self._of_kinds:
            model = self._costs.memory_model(replace(self._shape.of, recompute=kind))
            found = []
            for stage, layers in enumerate(model.stages):
                nothing = [0.0] * len(layers)
                moments = stage_moments(model, stage, 0, self._shape.of.slices, StageGradients(nothing, nothing, None))
                found.append(max(moments.inputs, moments.forward))
            self._of_kinds[kind] = found
        return self._of_kinds[kind]
