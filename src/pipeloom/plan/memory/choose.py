"""The cheapest way to keep every rank under a cap: how often to gather and reduce, and what to compute again.

Both trade memory for time: a finer granularity gathers and reduces more often, recomputation computes forwards twice.
Which is cheaper the simulator says, for the times of computations and the bandwidth between copies that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import add

from pipeloom.errors import InputError
from pipeloom.ir.action import Op
from pipeloom.ir.data_axis import DataAxis, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.passes import lower
from pipeloom.plan.memory.ranks import Model, RankMemory, memory_of_rank, memory_of_ranks
from pipeloom.sim import Costs, Network, simulate

_F, _B, _I, _W = Op.F, Op.B, Op.I, Op.W
_MOST_COMBINATIONS = 3**7  # of one rank's stages; with more stages, all of them recompute alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to train.

    Attributes:
        program: what every copy runs, with its data axis.
        model: with the recomputation of every stage.
        memory: of every rank.
        seconds: of a step, simulated.
    """

    program: Program
    model: Model
    memory: Sequence[RankMemory]
    seconds: float

    @property
    def peak(self) -> float:
        return max(rank.peak for rank in self.memory)


def choose_granularity(
    schedule: Schedule,
    model: Model,
    data: DataAxis,
    cap: float,
    *,
    costs: Costs | None = None,
    network: Network | None = None,
) -> Choice:
    """The quickest granularity of `data`'s strategy with which every rank stays under `cap` bytes.

    Args:
        schedule: of one copy.
        model: its layers.
        data: the copies; its own granularity counts for nothing.
        cap: bytes of a rank.
        costs: seconds of computations; by default a backward takes two forwards.
        network: between ranks, and between copies.

    Raises:
        InputError: none does; the message has the least that a rank takes.
    """
    return _best(_granularities(schedule, model, data, costs, network), cap)


def choose_recompute(
    program: Program, model: Model, cap: float, *, costs: Costs | None = None, network: Network | None = None
) -> Choice:
    """The least recomputation, stage by stage, with which every rank stays under `cap` bytes.

    Of each rank's stages, those are recomputed that cost least; selective recomputation costs the share that attention
    has of a forward.

    Raises:
        InputError: even with all forwards computed again some rank takes more; the message has how much.
    """
    return _best([_least_recompute(program, model, cap, costs, network)], cap)


def choose_memory(
    schedule: Schedule,
    model: Model,
    data: DataAxis,
    cap: float,
    *,
    costs: Costs | None = None,
    network: Network | None = None,
) -> Choice:
    """The quickest of all granularities, each with the least recomputation that it needs.

    Raises:
        InputError: none stays under `cap`; the message has the least that a rank takes.
    """
    plain = _granularities(schedule, model, data, costs, network)
    return _best([_least_recompute(choice.program, model, cap, costs, network) for choice in plain], cap)


def _best(choices: Sequence[Choice], cap: float) -> Choice:
    """The quickest that fits; of equal ones the first, which communicates least."""
    fitting = [choice for choice in choices if choice.peak <= cap]
    if not fitting:
        least = min(choices, key=lambda choice: choice.peak)
        rank = max(least.memory, key=lambda each: each.peak)
        raise InputError(
            f"a rank may hold {cap:.0f} bytes: rank {rank.rank} takes at least {rank.peak:.0f}; raise the cap, take "
            "more ranks or copies, or smaller micro-batches"
        )
    return min(fitting, key=lambda choice: choice.seconds)


def _granularities(
    schedule: Schedule, model: Model, data: DataAxis, costs: Costs | None, network: Network | None
) -> list[Choice]:
    possible = Granularity if data.shards_gradients else (Granularity.STEP,)
    programs = [lower(schedule, data=replace(data, granularity=granularity)) for granularity in possible]
    return [_choice(program, model, costs, network) for program in programs]


def _choice(program: Program, model: Model, costs: Costs | None, network: Network | None) -> Choice:
    return Choice(
        program=program,
        model=model,
        memory=memory_of_ranks(program, model),
        seconds=simulate(program, with_recompute(program.schedule, model, costs or Costs.uniform()), network).makespan,
    )


def with_recompute(schedule: Schedule, model: Model, costs: Costs) -> Costs:
    """`costs` with what backwards compute again, one time a stage."""
    table = costs.seconds(schedule)
    slices = schedule.num_slices
    again = [slices * seconds * model.recompute_share(stage) for stage, seconds in enumerate(table[_F])]
    forward, full, inputs, weights = (tuple(slices * seconds for seconds in table[op]) for op in (_F, _B, _I, _W))
    return replace(
        costs,
        forward=forward,
        backward=tuple(map(add, full, again)),
        backward_input=tuple(map(add, inputs, again)),
        backward_weight=weights,
    )


def _least_recompute(
    program: Program, model: Model, cap: float, costs: Costs | None, network: Network | None
) -> Choice:
    """Rank by rank, what costs least and fits; where nothing fits, what takes least."""
    kinds = list(Recompute)  # each keeps less than the one before
    chosen = [Recompute.NONE] * program.schedule.num_stages  # of a stage that two ranks hold, what either needs
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
    return _choice(program, replace(model, recompute=tuple(chosen)), costs, network)
