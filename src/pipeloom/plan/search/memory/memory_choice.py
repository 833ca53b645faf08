"""Recomputation and offload of a configuration whose memory is short. No torch here.

Of each rank, activations of how many micro-batches are in flight on each of its stages follows from its schedule. The
least recomputation is a knapsack per rank: over its stages, the least extra time with which the rank fits. Bytes are
those of some moments of the step, so that they are never more than its peak.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import sub

from pipeloom import schedules
from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.data_ways import state_bytes_per_parameter
from pipeloom.plan.search.memory.fixed_bytes import fixed_bytes
from pipeloom.plan.search.memory.knapsack import knapsack
from pipeloom.plan.search.memory.live_moments import Moments
from pipeloom.plan.search.memory.offload_bound import lowest_cap, most_live
from pipeloom.plan.search.memory.offload_room import OffloadRoom
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.shapes import Shape
from pipeloom.split.chain_partition import consecutive

Fixed = Sequence[Sequence[float]]  # of each rank, bytes beside activations at each of its moments
_TRIES = 8
_FEWER = 0.95  # of the bytes of an activation: less recomputation with offload is as good


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration of which nothing is open.

    Attributes:
        of: the configuration.
        schedule_limit: of `Simulated`.
        least_bytes: of the rank that needs most, at least.
    """

    of: Configuration
    schedule_limit: float | None = None
    least_bytes: float = 0.0

    @property
    def kept(self) -> float:
        """Activations that stay on a rank."""
        return inf if self.of.offload is None else self.of.offload


class MemoryChoices:
    """What the stages of a shape recompute.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        moments: of its ranks.
        request: what is planned.
    """

    def __init__(self, costs: StepCosts, shape: Shape, moments: Moments, request: Request) -> None:
        self._costs, self._shape, self._moments, self._request = costs, shape, moments, request
        of, self._kinds = shape.of, request.kinds
        self._known: dict[object, Fixed] = {}
        self._found: dict[object, tuple[list[Choice], float]] = {}
        self._offloaded: dict[object, dict[tuple[Recompute, ...], list[Choice]]] = {}
        free = "offload" not in request.fixed and request.allows("offload", 0)
        self._offloads = free and costs.can_offload and not schedules.find(of.schedule).to_measure
        self._kept = {
            kind: [size / of.slices for size in costs.kept_bytes(of._replace(recompute=kind))] for kind in self._kinds
        }
        block, counts = of._replace(pipeline=costs.num_blocks, chunks=1, blocks=None), of.blocks_of(costs.num_blocks)
        every = costs.kept_bytes(block._replace(recompute=Recompute.NONE))
        # While a backward recomputes its first block, the block's activations are there too; on the last stage those of
        # the head are gone by then. Slices share keys and values.
        self._again = {}
        for kind in self._kinds:
            stages = consecutive(list(map(sub, every, costs.kept_bytes(block._replace(recompute=kind)))), counts)
            self._again[kind] = [stage[-1] if stage and of.slices == 1 else 0.0 for stage in stages[:-1]] + [0.0]
        self._room = OffloadRoom(costs, shape, moments, self._kept)

    def _fixed(self, of: Configuration) -> Fixed:
        key = of.data_axis(), of.offload_states
        if key not in self._known:
            self._known[key] = fixed_bytes(self._costs, of, self._shape, self._moments)
        return self._known[key]

    @cached_property
    def _seconds(self) -> dict[Recompute, list[float]]:
        """Seconds of one micro-batch per stage, by kind of recomputation."""
        of = self._shape.of
        return {kind: list(map(sum, self._costs.stage_seconds(of._replace(recompute=kind)))) for kind in self._kinds}

    @staticmethod
    def key(shape: Shape, request: Request) -> Hashable:
        """Of all that the choices depend on, but for the model and its cluster."""
        recompute, offload = (request.fixed.get(name) for name in ("recompute", "offload"))
        given = recompute and tuple(recompute), offload, request.allows("offload", 0)
        return shape.of, shape.split, request.kinds, request.memory_bytes, request.objective, given

    def found(
        self, of: Configuration, beside: Sequence[float] | None = None, *, every: bool = False
    ) -> tuple[list[Choice], float]:
        """The choice with the least extra time that fits by closed forms, and the bytes that some rank needs at least.

        Where no choice fits with `beside`, it is the most recomputation, if that may fit without.

        Args:
            of: the configuration of the shape, with a data strategy.
            beside: bytes of each rank that closed forms do not have.
            every: whether to return the same kind for all stages too, each of them.
        """
        key = of, every, beside and tuple(beside)
        if key not in self._found:
            self._found[key] = self._find(of, beside, every)
        return self._found[key]

    def _find(self, of: Configuration, beside: Sequence[float] | None, every: bool) -> tuple[list[Choice], float]:
        fixed = self._fixed(of)
        more = beside or [0.0] * len(fixed)
        tight = [[size + extra for size in sizes] for sizes, extra in zip(fixed, more, strict=True)]
        uniform, offload = self.uniform(), self._request.fixed.get("offload")
        if "recompute" in self._request.fixed or offload is not None:
            candidates = uniform
        else:
            least = uniform[-1] if self._request.objective == "memory" else self._least(tight)
            candidates = [least] if least else uniform[-1:]
            if every:
                candidates = list(dict.fromkeys([*candidates, *uniform]))
        choices = [self._choice(of, each, fixed, offload) for each in candidates]
        most = self._request.memory_bytes
        return [each for each in choices if each.least_bytes <= most], min(each.least_bytes for each in choices)

    def offloaded(
        self, of: Configuration, beside: Sequence[float] | None = None, *, every: bool = False
    ) -> dict[tuple[Recompute, ...], list[Choice]]:
        """For each recomputation with which not all activations fit, choices that keep as many as fit by closed forms.

        It ends with the least recomputation with which all activations fit, which has no choices: with more, offload
        would save nothing.

        Args:
            of, beside: as for `found`.
            every: whether to return those that keep fewer too.
        """
        if not self._offloads:
            return {}
        key = of, every, beside and tuple(beside)
        if key not in self._offloaded:
            self._offloaded[key] = self._find_offloaded(of, beside, every)
        return self._offloaded[key]

    def _find_offloaded(
        self, of: Configuration, beside: Sequence[float] | None, every: bool
    ) -> dict[tuple[Recompute, ...], list[Choice]]:
        fixed = self._fixed(of)
        more = beside or [0.0] * len(fixed)
        found: dict[tuple[Recompute, ...], list[Choice]] = {}
        tight = [[size + extra for size in sizes] for sizes, extra in zip(fixed, more, strict=True)]
        smallest = self._request.objective == "memory"
        for recompute in self.uniform()[-1:] if smallest else self._offloadable:
            number = 0 if smallest else self._room.number(tight, recompute, self._request.memory_bytes)
            if number is None:
                found[recompute] = []
                break
            numbers = [number] if number >= lowest_cap(self._shape.of) or smallest else []
            if every:
                numbers = [*range(most_live(self._shape.of) - 1, lowest_cap(self._shape.of) - 1, -1), *numbers]
            if numbers:
                found[recompute] = [self._choice(of, recompute, fixed, each) for each in dict.fromkeys(numbers)]
        return found

    @cached_property
    def _offloadable(self) -> list[tuple[Recompute, ...]]:
        """The choices in `uniform` that keep clearly fewer bytes than all those with less recomputation."""
        found: list[tuple[Recompute, ...]] = []
        least = inf
        for recompute in self.uniform():
            size = sum(self._kept[kind][stage] for stage, kind in enumerate(recompute))
            if size < _FEWER * least:
                found.append(recompute)
                least = size
        return found

    def least_offloaded(self, of: Configuration) -> float:
        """Bytes that some rank needs at least with offload; infinite where there is none."""
        if not self._offloads:
            return inf
        fixed, lowest = self._fixed(of), lowest_cap(of)
        return min((self._room.bytes(fixed, each, lowest) for each in self.uniform()[-1:]), default=inf)

    def closed_bytes(self, of: Configuration, choice: Configuration) -> list[float]:
        """Bytes of every rank by closed forms, with the recomputation of a choice of `of` without offload."""
        fixed = self._fixed(of)
        recompute = [choice.recompute_of(stage) for stage in range(choice.stages)]
        return [self._bytes(rank, sizes, recompute) for rank, sizes in enumerate(fixed)]

    def uniform(self) -> list[tuple[Recompute, ...]]:
        """The same kind for all stages, the least recomputation first; of fixed kinds, those of the stages."""
        stages, given = self._shape.placement.num_stages, self._request.fixed.get("recompute")
        if given is None:
            return [(kind,) * stages for kind in self._kinds]
        kinds = tuple(map(Recompute, given))
        return [kinds * stages] if len(kinds) == 1 else [kinds] if len(kinds) == stages else []

    def _bytes(self, rank: int, sizes: Sequence[float], recompute: Sequence[Recompute]) -> float:
        """Peak bytes of a rank, with `sizes` in addition to activations."""
        return self._fullest(rank, sizes, recompute)[1]

    def _fullest(self, rank: int, sizes: Sequence[float], recompute: Sequence[Recompute]) -> tuple[int, float]:
        """The moment at which a rank holds most, and its bytes."""
        most, at = -inf, 0
        kept, again = self._kept, self._again
        for number, (size, moment) in enumerate(zip(sizes, self._moments[rank], strict=True)):
            if moment.op is not Op.W:
                size += again[recompute[moment.stage]][moment.stage]
            for stage, count in moment.live.items():
                size += count * kept[recompute[stage]][stage]
            if size > most:
                most, at = size, number
        return at, most

    def _choice(self, of: Configuration, recompute: tuple[Recompute, ...], fixed: Fixed, offload: int | None) -> Choice:
        of = of._replace(recompute=recompute, offload=offload)
        if offload is None:
            least = max(self._bytes(rank, sizes, recompute) for rank, sizes in enumerate(fixed))
        else:
            least = self._room.least(fixed, recompute)
        limit = None
        if schedules.find(of.schedule).to_measure and self._request.memory_bytes < inf:
            share = max(
                sum(self._kept[recompute[stage]][stage] for stage in moments[0].live) for moments in self._moments
            )
            gradients = NumberBytes.of(of.precision).gradient
            parameters = max(self._costs.held_parameters(of, held) for held in self._shape.placement.stages_of)
            always = (state_bytes_per_parameter(of) + gradients) * parameters
            limit = max(0.0, self._request.memory_bytes - always) / share if share else None
        return Choice(of=of, schedule_limit=limit, least_bytes=least)

    def _least(self, fixed: Fixed) -> tuple[Recompute, ...] | None:
        """The least recomputation that fits; None where nothing does."""
        kinds, stages = self._kinds, self._shape.placement.num_stages
        for kind in (kinds[0], kinds[-1]):
            fits = all(self._fits(rank, sizes, (kind,) * stages) for rank, sizes in enumerate(fixed))
            if fits is (kind == kinds[0]):
                return (kind,) * stages if fits else None
        chosen = [0] * stages
        for rank, sizes in enumerate(fixed):
            best = self._of_rank(rank, sizes)
            if best is None:
                return None
            for stage, number in best.items():
                chosen[stage] = max(chosen[stage], number)
        return tuple(kinds[number] for number in chosen)

    def _fits(self, rank: int, sizes: Sequence[float], recompute: Sequence[Recompute]) -> bool:
        return self._bytes(rank, sizes, recompute) <= self._request.memory_bytes

    def _of_rank(self, rank: int, sizes: Sequence[float]) -> dict[int, int] | None:
        """The least recomputation of a rank by stage, as a number of a kind; None where nothing fits."""
        kinds, most = self._kinds, self._request.memory_bytes
        recompute = [kinds[0]] * self._shape.placement.num_stages
        if self._fits(rank, sizes, recompute):
            return {}
        seconds = self._seconds
        extra = {kind: list(map(sub, seconds[kind], seconds[kinds[0]])) for kind in kinds}
        needed: dict[int, dict[int, int]] = {}  # by moment, the number of each stage's kind
        rooms = [most - size for size in sizes]
        for _ in range(_TRIES):
            at, held = self._fullest(rank, sizes, recompute)
            if held <= most:
                return {stage: kinds.index(recompute[stage]) for stage in self._shape.placement.stages_of[rank]}
            if at in needed:
                rooms[at] -= held - most
            live = self._moments[rank][at].live
            others = [each for moment, each in needed.items() if moment != at]
            least = {stage: max((each.get(stage, 0) for each in others), default=0) for stage in live}
            items = [
                [(extra[kind][stage], n * self._kept[kind][stage]) for kind in kinds[least[stage] :]]
                for stage, n in live.items()
            ]
            best = knapsack(items, rooms[at])
            if best is None:
                return None
            needed[at] = {stage: number + least[stage] for stage, number in zip(live, best, strict=True)}
            for stage in self._shape.placement.stages_of[rank]:
                recompute[stage] = kinds[max(each.get(stage, 0) for each in needed.values())]
        return None
