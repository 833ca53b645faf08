"""Bytes of a rank at each of its moments, beside the activations that are live. No torch here.

Model states, gradients of other stages and gathered parameters are there; what is inside of the computation comes on
top (`pipeloom.plan.search.memory.stage_bytes`).
"""

from collections.abc import Hashable, Sequence

from pipeloom.ir.data_axis import DataAxis, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.memory.live_moments import Moments
from pipeloom.plan.search.memory.stage_bytes import KnownBytes, StageBytes, code
from pipeloom.plan.search.space.shapes import Shape


class Beside:
    """Bytes of a shape with a data strategy, beside live activations.

    Args:
        moments: of each rank.
        codes: the `code` of each.
        sizes: of each rank at its moments, without what is inside of the computation.
        stages: what is inside of each.
    """

    def __init__(
        self,
        moments: Moments,
        codes: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[float]],
        stages: Sequence[StageBytes],
    ) -> None:
        self._moments, self._codes, self._sizes, self.stages = moments, codes, sizes, stages
        self._of_recompute: dict[tuple[Recompute, ...], list[list[float]]] = {}

    def at(self, rank: int, number: int, recompute: Sequence[Recompute]) -> float:
        """Bytes of a rank at a moment, where every stage has a kind of recomputation."""
        stage = self._moments[rank][number].stage
        return self._sizes[rank][number] + self.stages[stage].inside(recompute[stage])[self._codes[rank][number]]

    def of(self, recompute: tuple[Recompute, ...]) -> list[list[float]]:
        """`at`, of each rank at its moments."""
        if recompute not in self._of_recompute:
            insides = [stage.inside(kind) for stage, kind in zip(self.stages, recompute, strict=True)]
            self._of_recompute[recompute] = [
                [size + insides[moment.stage][code] for size, moment, code in zip(*of_rank, strict=True)]
                for of_rank in zip(self._sizes, self._moments, self._codes, strict=True)
            ]
        return self._of_recompute[recompute]


class MomentBytes:
    """The bytes of a shape, by data strategy.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        moments: of its ranks.
        known: of other shapes.
    """

    def __init__(self, costs: StepCosts, shape: Shape, moments: Moments, known: KnownBytes) -> None:
        self._placement, self._moments, self._stages = shape.placement, moments, known.of(costs, shape)
        self._codes = [list(map(code, each)) for each in moments]
        self._found: dict[Hashable, Beside] = {}

    def of(self, of: Configuration) -> Beside:
        """With the data strategy of a configuration."""
        key = data, _ = of.data_axis(), of.offload_states
        if key not in self._found:
            sizes = [self._sizes(of, data, rank) for rank in range(self._placement.num_ranks)]
            self._found[key] = Beside(self._moments, self._codes, sizes, self._stages.of(of))
        return self._found[key]

    def _sizes(self, of: Configuration, data: DataAxis, rank: int) -> list[float]:
        always, stages = self._stages.always(of, rank), self._stages.of(of)
        once = data.degree == 1 or data.granularity is Granularity.STEP
        once = once or len(self._placement.stages_of[rank]) == 1  # all computations of a rank are one run
        ahead = data.strategy.shards_parameters and data.granularity is Granularity.CHUNK
        found: list[float] = []
        for moment in self._moments[rank]:
            others = moment.summing - {moment.stage}
            size = always + sum(stages[stage].full if once else stages[stage].reduced for stage in others)
            if once and data.strategy.shards_parameters:
                there = {stage for stage, count in moment.live.items() if count} | others
                size += sum(stages[stage].gathered for stage in there - {moment.stage})
            elif ahead and moment.following is not None:
                size += stages[moment.following].coming
            found.append(size)
        return found
