"""Recomputation and offload of a configuration whose memory is short. No torch here.

Of each rank, activations of how many micro-batches are in flight on each of its stages follows from its schedule. The
least recomputation is a knapsack per rank: over its stages, the least extra time with which the rank fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from operator import sub

from pipeloom import schedules
from pipeloom.ir import Op, Schedule
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.shapes import Shape
from pipeloom.plan.search.simulated import short_microbatches
from pipeloom.plan.search.space import state_bytes_per_parameter

Live = Sequence[Counter[int]]  # for each rank, activations per stage at the moment when it holds most
_KINDS = tuple(Recompute)  # each keeps less than the one before it


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


def live_forwards(schedule: Schedule) -> list[Counter[int]]:
    """For each rank, the activations per stage at the moment when it holds most."""
    found = []
    for order in schedule.orders:
        live: Counter[int] = Counter()
        most, count, best = 0, 0, live
        for stage, op, microbatch, piece in order:
            if op is Op.F:
                live[stage] += 1
                count += 1
                if count > most:
                    most, best = count, live.copy()
            elif op is Op.W or (op is Op.B and (stage, microbatch, piece) not in schedule.split_backwards):
                live[stage] -= 1
                count -= 1
        found.append(best)
    return found


def in_flight(of: Configuration) -> Live:
    """`live_forwards` of a step. Raises ScheduleError where the schedule does not support the sizes.

    A schedule that is built for measured times and a memory limit holds one activation of each stage at least.
    """
    if schedules.find(of.schedule).to_measure:
        return [Counter(range(rank, of.stages, of.pipeline)) for rank in range(of.pipeline)]
    number, group = short_microbatches(of, of.stages)
    found = _live(of.schedule, of.pipeline, number, of.chunks, of.slices)
    times = (of.microbatches - number) // group
    if not times:
        return found
    less = _live(of.schedule, of.pipeline, number - group, of.chunks, of.slices)
    return [
        Counter({stage: count + times * max(0, count - before[stage]) for stage, count in after.items()})
        for after, before in zip(found, less, strict=True)
    ]


@lru_cache(maxsize=512)
def _live(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> list[Counter[int]]:
    family = schedules.find(name)
    number = None if family.chunks else chunks
    return live_forwards(family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices))


class MemoryChoices:
    """What a shape recomputes.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with data strategy and blocks per stage.
        live: its activations in flight.
        request: what is planned.
        beside: bytes of each rank that closed forms do not have.
    """

    def __init__(
        self, costs: CostModel, shape: Shape, live: Live, request: Request, beside: Sequence[float] | None = None
    ) -> None:
        self._costs, self._of, self._shape, self._live, self._request = costs, shape.of, shape, live, request
        beside = beside or [0.0] * len(live)
        self._always = [size + more for size, more in zip(always_bytes(costs, shape), beside, strict=True)]
        self._kinds = request.kinds
        self._kept = {
            kind: [size / self._of.slices for size in costs.kept_bytes(replace(self._of, recompute=kind))]
            for kind in self._kinds
        }

    def found(self, *, every: bool = False) -> tuple[list[Choice], float]:
        """The choice with the least extra time that fits by closed forms, and the bytes that some rank needs at least.

        Args:
            every: whether to return the same kind for all stages too, each of them.
        """
        stages, given = self._shape.placement.num_stages, self._request.fixed.get("recompute")
        if given is not None and len(given) not in (1, stages):
            return [], inf
        kinds = list(map(Recompute, given)) if given is not None else []
        if kinds:
            candidates = [tuple(kinds * stages if len(kinds) == 1 else kinds)]
        else:
            candidates = [(kind,) * stages for kind in self._kinds]
            least = self._least()
            if every:
                candidates = list(dict.fromkeys([*([least] if least else []), *candidates]))
            elif self._request.objective == "memory":
                candidates = candidates[-1:]
            else:
                candidates = [least] if least else candidates[-1:]
        choices = [self._choice(each) for each in candidates]
        most = self._request.memory_bytes
        return [each for each in choices if each.least_bytes <= most], min(each.least_bytes for each in choices)

    def _choice(self, recompute: tuple[Recompute, ...]) -> Choice:
        of = replace(self._of, recompute=recompute, offload=self._request.fixed.get("offload"))
        held = [
            always + sum(count * self._kept[recompute[stage]][stage] for stage, count in counts.items())
            for always, counts in zip(self._always, self._live, strict=True)
        ]
        if of.offload is not None:
            held = self._always
        limit = None
        if schedules.find(of.schedule).to_measure and self._request.memory_bytes < inf:
            share = max(sum(self._kept[recompute[stage]][stage] for stage in counts) for counts in self._live)
            limit = max(0.0, self._request.memory_bytes - max(self._always)) / share if share else None
        return Choice(of=of, schedule_limit=limit, least_bytes=max(held))

    def _least(self) -> tuple[Recompute, ...] | None:
        """The least recomputation that fits; None where nothing does."""
        kinds, stages = self._kinds, self._shape.placement.num_stages
        room = [self._request.memory_bytes - always for always in self._always]
        first = self._kept[kinds[0]]
        if all(sum(count * first[stage] for stage, count in counts.items()) <= rest
               for counts, rest in zip(self._live, room, strict=True)):  # fmt: skip
            return (kinds[0],) * stages
        seconds = {kind: list(map(sum, self._costs.stage_seconds(replace(self._of, recompute=kind)))) for kind in kinds}
        extra = {kind: list(map(sub, seconds[kind], seconds[kinds[0]])) for kind in kinds}
        chosen = [0] * stages
        for counts, rest in zip(self._live, room, strict=True):
            best = knapsack(
                [
                    [(extra[kind][stage], count * self._kept[kind][stage]) for kind in kinds]
                    for stage, count in counts.items()
                ],
                rest,
            )
            if best is None:
                return None
            for stage, kind in zip(counts, best, strict=True):
                chosen[stage] = max(chosen[stage], kind)
        return tuple(kinds[kind] for kind in chosen)


def always_bytes(costs: CostModel, shape: Shape) -> list[float]:
    """Bytes of every rank beside activations, at least."""
    of, each = shape.of, state_bytes_per_parameter(shape.of)
    formats, found = NumberBytes.of(of.precision), []
    fine = of.granularity is Granularity.MICROBATCH and of.replicas > 1
    parameters = costs.parameters(of)
    for held in shape.placement.stages_of:
        total, sizes = costs.held_parameters(of, held), [parameters[stage] for stage in held]
        gradients = formats.gradient * total
        if of.strategy.shards_gradients and of.granularity is not Granularity.STEP:
            gradients = gradients / of.replicas + (0.0 if fine else formats.gradient * min(sizes))
        gathered = 0.0
        if of.strategy.shards_parameters and not fine:
            gathered = formats.compute * (total if of.granularity is Granularity.STEP else min(sizes))
        found.append(each * total + gradients * (of.microbatches > 1) + gathered)
    return found


def knapsack(items: Sequence[Sequence[tuple[float, float]]], most: float) -> tuple[int, ...] | None:
    """One alternative of each item, with the least sum of the first numbers and second ones of at most `most`.

    Exact: of the sums of the first items, those stay of which no other is smaller in both.

    Args:
        items: pairs of cost and size of their alternatives.
        most: sum of the sizes.

    Returns:
        The number of each item's alternative; None if none fit.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for alternatives in items:
        sums = sorted(
            (cost + more, size + bigger, (*chosen, number))
            for cost, size, chosen in front
            for number, (more, bigger) in enumerate(alternatives)
        )
        front, least = [], inf
        for each in sums:
            if each[1] < least * (1 - 1e-12):
                front.append(each)
                least = each[1]
    return next((chosen for _, size, chosen in front if size <= most), None)
