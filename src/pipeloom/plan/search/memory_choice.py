"""Recomputation and offload of a configuration whose memory is short. No torch here.

Of each rank, activations of how many micro-batches are in flight on each of its stages follows from its schedule. The
least recomputation is a knapsack per rank: over its stages, the least extra time with which the rank fits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from operator import add, sub

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
    """What the stages of a shape recompute.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        live: its activations in flight.
        request: what is planned.
    """

    def __init__(self, costs: CostModel, shape: Shape, live: Live, request: Request) -> None:
        self._costs, self._shape, self._live, self._request = costs, shape, live, request
        of, self._kinds = shape.of, request.kinds
        self._kept = {
            kind: [size / of.slices for size in costs.kept_bytes(replace(of, recompute=kind))] for kind in self._kinds
        }
        block = replace(of, pipeline=costs.num_blocks, chunks=1, blocks=None)
        middle = costs.num_blocks // 2
        sizes_of = {kind: costs.kept_bytes(replace(block, recompute=kind))[middle] / of.slices for kind in Recompute}
        # While a backward recomputes a block, its activations are there too.
        self._again = {kind: sizes_of[Recompute.NONE] - sizes_of[kind] for kind in self._kinds}
        self._held = {
            kind: [self._again[kind] + sum(count * sizes[stage] for stage, count in counts.items()) for counts in live]
            for kind, sizes in self._kept.items()
        }

    @cached_property
    def _seconds(self) -> dict[Recompute, list[float]]:
        """Of every stage and one micro-batch."""
        of = self._shape.of
        return {kind: list(map(sum, self._costs.stage_seconds(replace(of, recompute=kind)))) for kind in self._kinds}

    def found(
        self, of: Configuration, beside: Sequence[float] | None = None, *, every: bool = False
    ) -> tuple[list[Choice], float]:
        """The choice with the least extra time that fits by closed forms, and the bytes that some rank needs at least.

        Args:
            of: the configuration of the shape, with a data strategy.
            beside: bytes of each rank that closed forms do not have.
            every: whether to return the same kind for all stages too, each of them.
        """
        always = always_bytes(self._costs, of, self._shape)
        if beside is not None:
            always = list(map(add, always, beside))
        stages, given = self._shape.placement.num_stages, self._request.fixed.get("recompute")
        if given is not None and len(given) not in (1, stages):
            return [], inf
        if given is not None:
            kinds = tuple(map(Recompute, given))
            candidates = [kinds * stages if len(kinds) == 1 else kinds]
        else:
            uniform = [(kind,) * stages for kind in self._kinds]
            least = uniform[-1] if self._request.objective == "memory" else self._least(always)
            candidates = [least] if least else uniform[-1:]
            if every:
                candidates = list(dict.fromkeys([*candidates, *uniform]))
        choices = [self._choice(of, each, always) for each in candidates]
        most = self._request.memory_bytes
        return [each for each in choices if each.least_bytes <= most], min(each.least_bytes for each in choices)

    def _choice(self, of: Configuration, recompute: tuple[Recompute, ...], always: Sequence[float]) -> Choice:
        of = replace(of, recompute=recompute, offload=self._request.fixed.get("offload"))
        held = [
            size
            + sum(count * self._kept[recompute[stage]][stage] for stage, count in counts.items())
            + max((self._again[recompute[stage]] for stage in counts), default=0.0)
            for size, counts in zip(always, self._live, strict=True)
        ]
        if of.offload is not None:
            held = list(always)
        limit = None
        if schedules.find(of.schedule).to_measure and self._request.memory_bytes < inf:
            share = max(sum(self._kept[recompute[stage]][stage] for stage in counts) for counts in self._live)
            limit = max(0.0, self._request.memory_bytes - max(always)) / share if share else None
        return Choice(of=of, schedule_limit=limit, least_bytes=max(held))

    def _least(self, always: Sequence[float]) -> tuple[Recompute, ...] | None:
        """The least recomputation that fits; None where nothing does."""
        kinds, stages = self._kinds, self._shape.placement.num_stages
        room = [self._request.memory_bytes - size for size in always]
        for kind in (kinds[0], kinds[-1]):
            fits = all(held <= rest for held, rest in zip(self._held[kind], room, strict=True))
            if fits is (kind == kinds[0]):
                return (kind,) * stages if fits else None
        seconds = self._seconds
        extra = {kind: list(map(sub, seconds[kind], seconds[kinds[0]])) for kind in kinds}
        chosen = [0] * stages
        for counts, held, rest in zip(self._live, self._held[kinds[0]], room, strict=True):
            if held <= rest:
                continue
            best = knapsack(
                [
                    [(extra[kind][stage], count * self._kept[kind][stage]) for kind in kinds]
                    for stage, count in counts.items()
                ],
                rest - max(self._again.values()),
            )
            if best is None:
                return None
            for stage, number in zip(counts, best, strict=True):
                chosen[stage] = max(chosen[stage], number)
        return tuple(kinds[number] for number in chosen)


def always_bytes(costs: CostModel, of: Configuration, shape: Shape) -> list[float]:
    """Bytes of every rank beside activations, at least."""
    each = state_bytes_per_parameter(of)
    formats, found = NumberBytes.of(of.precision), []
    fine = of.granularity is Granularity.MICROBATCH and of.replicas > 1
    parameters = costs.parameters(of)
    for held in shape.placement.stages_of:
        total, sizes = costs.held_parameters(of, held), [parameters[stage] for stage in held]
        unit = (parameters[-1] / max(1, of.blocks[-1]) if of.blocks else min(sizes)) * (of.replicas > 1)
        gradients = formats.gradient * total
        if of.strategy.shards_gradients and of.granularity is not Granularity.STEP:
            gradients = gradients / of.replicas + formats.gradient * (2 * unit if fine else 2 * min(sizes))
        gathered = 0.0
        if of.strategy.shards_parameters and not fine:
            gathered = formats.compute * (total if of.granularity is Granularity.STEP else 2 * min(sizes))
        elif of.strategy.shards_parameters:
            gathered = formats.compute * 2 * unit
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
