"""Data strategy, recomputation and offload of a configuration whose memory is short. No torch here.

Of each rank, activations of how many micro-batches are in flight on each of its stages follows from its schedule. The
least recomputation is a knapsack per rank: over its stages, the least extra time with which the rank fits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import sub

from pipeloom import schedules
from pipeloom.ir import Op, Schedule
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.space import Shape, state_bytes_per_parameter

_KINDS = tuple(Recompute)  # each keeps less than the one before it


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


@lru_cache(maxsize=512)
def in_flight(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> list[Counter[int]]:
    """`live_forwards` of a named schedule. Raises ScheduleError where it does not support the sizes."""
    family = schedules.find(name)
    number = None if family.chunks else chunks
    made = family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices)
    return live_forwards(made)


def memory_choices(
    costs: CostModel, shape: Shape, live: Sequence[Counter[int]], request: Request
) -> Iterator[Configuration]:
    """Configurations with the least recomputation that fits, by closed forms; none where everything does not fit."""
    of = shape.of
    room = [request.memory_bytes - size for size in _always(costs, of, shape)]
    for recompute in _recomputes(costs, of, shape, live, room, request):
        yield replace(of, recompute=recompute)


def _always(costs: CostModel, of: Configuration, shape: Shape) -> list[float]:
    """Bytes of every rank beside activations, at least."""
    parameters, each = costs.parameters(of), state_bytes_per_parameter(of)
    formats = NumberBytes.of(of.precision)
    found = []
    fine = of.granularity is Granularity.MICROBATCH and of.replicas > 1
    for held in shape.placement.stages_of:
        sizes = [parameters[stage] for stage in held]
        gradients = formats.gradient * sum(sizes)
        if of.strategy.shards_gradients and of.granularity is not Granularity.STEP:
            gradients = gradients / of.replicas + (0.0 if fine else formats.gradient * min(sizes))
        gathered = 0.0
        if of.strategy.shards_parameters and not fine:
            gathered = formats.compute * (sum(sizes) if of.granularity is Granularity.STEP else min(sizes))
        found.append(each * sum(sizes) + gradients * (of.microbatches > 1) + gathered)
    return found


def _recomputes(
    costs: CostModel,
    of: Configuration,
    shape: Shape,
    live: Sequence[Counter[int]],
    room: Sequence[float],
    request: Request,
) -> Iterator[tuple[Recompute, ...]]:
    """The least recomputation that fits, or what is given; nothing where everything recomputed does not fit."""
    stages = shape.placement.num_stages
    given = request.fixed.get("recompute")
    if given is not None:
        if len(given) in (1, stages):
            yield tuple(Recompute(word) for word in (given * stages if len(given) == 1 else given))
        return
    kinds = (Recompute.NONE,) if "recompute" in request.forbidden else _KINDS
    kept = {kind: [size / of.slices for size in costs.kept_bytes(replace(of, recompute=kind))] for kind in kinds}
    if request.objective == "memory":
        yield (kinds[-1],) * stages
        return
    if all(_needs(kept[Recompute.NONE], counts) <= rest for counts, rest in zip(live, room, strict=True)):
        yield (Recompute.NONE,) * stages
        return
    seconds = {kind: [sum(each) for each in costs.stage_seconds(replace(of, recompute=kind))] for kind in kinds}
    extra = {kind: list(map(sub, seconds[kind], seconds[Recompute.NONE])) for kind in kinds}
    chosen = [0] * stages
    for counts, rest in zip(live, room, strict=True):
        best = knapsack(
            [[(extra[kind][stage], counts[stage] * kept[kind][stage]) for kind in kinds] for stage in counts], rest
        )
        if best is None:
            return
        for stage, kind in zip(counts, best, strict=True):
            chosen[stage] = max(chosen[stage], kind)
    yield tuple(kinds[kind] for kind in chosen)


def _needs(kept: Sequence[float], counts: Counter[int]) -> float:
    return sum(count * kept[stage] for stage, count in counts.items())


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
        front, least = [], float("inf")
        for each in sums:
            if each[1] < least * (1 - 1e-12):
                front.append(each)
                least = each[1]
    return next((chosen for _, size, chosen in front if size <= most), None)
