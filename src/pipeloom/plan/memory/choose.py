"""The fastest run with every rank under a memory cap: data granularity and activation recomputation.

Both trade memory for time: a finer granularity gathers and reduces more often, recomputation computes forwards twice.
The simulator estimates which is faster, for given times of computations and bandwidth between replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import add

from pipeloom.common.quantities import bytes_text
from pipeloom.errors import InputError
from pipeloom.ir import Op, Program, Schedule
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.memory.memory_model import MemoryModel, num_expert_parameters, num_parameters
from pipeloom.plan.memory.rank_memory import RankMemory, memory_of_rank, memory_of_ranks
from pipeloom.plan.memory.stage_units import units_of_rank
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.sim import Costs, Network, simulate
from pipeloom.sim.costs import MOST_UNITS

_MOST_COMBINATIONS = 3**7  # per rank; with more, all stages of the rank recompute alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to train.

    Attributes:
        program: what every replica runs, with its data axis.
        model: with the recomputation of every stage.
        memory: of every rank.
        seconds: simulated time per step.
    """

    program: Program
    model: MemoryModel
    memory: Sequence[RankMemory]
    seconds: float

    @property
    def peak(self) -> float:
        return max(rank.peak for rank in self.memory)


def choose_memory(
    programs: Sequence[Program],
    model: MemoryModel,
    cap: float,
    *,
    costs: Costs | None = None,
    network: Network | None = None,
) -> Choice:
    """The fastest of `programs`, each with the least recomputation that keeps every rank under `cap` bytes.

    On each rank, the stages with the least extra time are recomputed. Selective recomputation costs the share of
    attention in a forward.

    Args:
        programs: ways to run one schedule, such as one per granularity; those that communicate least first.
        model: the layers.
        cap: bytes per rank.
        costs: seconds of computations; by default a backward takes two forwards. Bytes and units of parameters and
            gradients are the model's where the costs do not give them.
        network: between ranks, and between replicas.

    Raises:
        InputError: some rank exceeds the cap even if everything is recomputed; the message has its least peak memory.
    """
    models = [_least_recompute(program, model, cap) for program in programs]
    choices = [_choice(program, each, costs, network) for program, each in zip(programs, models, strict=True)]
    fitting = [choice for choice in choices if choice.peak <= cap]
    if not fitting:
        least = min(choices, key=lambda choice: choice.peak)
        rank = max(least.memory, key=lambda each: each.peak)
        raise InputError(
            f"cap={cap:.0f} bytes ({bytes_text(cap)}): rank {rank.rank} needs at least {rank.peak:.0f} "
            f"({bytes_text(rank.peak)}). Raise the cap, or use more ranks, more replicas or smaller micro-batches."
        )
    return min(fitting, key=lambda choice: choice.seconds)  # of equal ones the first, which communicates least


def _choice(program: Program, model: MemoryModel, costs: Costs | None, network: Network | None) -> Choice:
    costs = _with_recompute(program.schedule, model, costs or Costs.uniform())
    if network is not None and program.data is not None:
        if costs.parameter_bytes is None:
            parameters, gradients = stage_bytes(model, program.data.degree)
            costs = replace(costs, parameter_bytes=parameters, gradient_bytes=gradients)
        if costs.units is None:
            counts = [1] * program.schedule.num_stages
            for rank in range(program.num_ranks):
                for stage, units in units_of_rank(program, model, rank).items():
                    counts[stage] = min(MOST_UNITS, max(counts[stage], len(units)))
            costs = replace(costs, units=tuple(counts))
    memory = memory_of_ranks(program, model)
    return Choice(program=program, model=model, memory=memory, seconds=simulate(program, costs, network).makespan)


def stage_bytes(model: MemoryModel, replicas: int = 1) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage, the bytes of its parameters and of their gradients, as replicas exchange them.

    With expert parallelism, fewer of the `replicas` share an expert. What a ring of them sends counts as the share of
    a ring of all replicas that sends as much.
    """
    formats = NumberBytes.of(model.precision)
    counts = [float(num_parameters(stage)) for stage in model.stages]
    if model.expert > 1 and replicas > 1:
        few = replicas // model.expert
        share = (few - 1) / few / ((replicas - 1) / replicas)
        counts = [n - (1 - share) * num_expert_parameters(s) for n, s in zip(counts, model.stages, strict=True)]
    return tuple(float(formats.compute * n) for n in counts), tuple(float(formats.gradient * n) for n in counts)


def _with_recompute(schedule: Schedule, model: MemoryModel, costs: Costs) -> Costs:
    """`costs` with recomputation in the backwards, per stage."""
    table = costs.seconds(schedule)
    slices = schedule.num_slices
    again = [slices * seconds * model.recompute_share(stage) for stage, seconds in enumerate(table[Op.F])]
    ops = (Op.F, Op.B, Op.I, Op.W)
    forward, full, inputs, weights = (tuple(slices * seconds for seconds in table[op]) for op in ops)
    return replace(
        costs,
        forward=forward,
        backward=tuple(map(add, full, again)),
        backward_input=tuple(map(add, inputs, again)),
        backward_weight=weights,
    )


def _least_recompute(program: Program, model: MemoryModel, cap: float) -> MemoryModel:
    """Rank by rank, the least extra time that fits; where nothing fits, the least memory."""
    kinds = list(Recompute)  # each keeps less than the one before it
    chosen = [Recompute.NONE] * program.schedule.num_stages  # a stage on two ranks gets what either needs
    for rank, stages in enumerate(program.placement.stages_of):
        possible = [kinds[kinds.index(chosen[stage]) :] for stage in stages]
        combinations = list(product(*possible)) if len(kinds) ** len(stages) <= _MOST_COMBINATIONS else []
        combinations = combinations or [tuple(max(kind, p[0], key=kinds.index) for p in possible) for kind in kinds]
        tried = []
        for combination in combinations:
            for stage, kind in zip(stages, combination, strict=True):
                chosen[stage] = kind
            each = replace(model, recompute=tuple(chosen))
            cost = sum(each.recompute_share(stage) * len(each.stages[stage]) for stage in stages)
            tried.append((cost, memory_of_rank(program, each, rank).peak, combination))
        fitting = [each for each in tried if each[1] <= cap]
        best = min(fitting) if fitting else min(tried, key=lambda each: each[1])
        for stage, kind in zip(stages, best[2], strict=True):
            chosen[stage] = kind
    return replace(model, recompute=tuple(chosen))
