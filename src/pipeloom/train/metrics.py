"""What a step cost: measured on every rank, summed in one collective, set against what the simulator says."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.ir import Action, Op, Program, Schedule
from pipeloom.runtime import Pipeline
from pipeloom.sim import Costs, Network, Timeline, simulate

Records = Sequence[tuple[int, Sequence[tuple[Action, float, float]]]]

_OPS = (Op.F, Op.B, Op.I, Op.W)
_RECENT_STEPS = 20  # medians are taken over so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step on all ranks.

    Attributes:
        bubble_fraction: 1 - mean computing time of the ranks / longest time from a rank's first to its last
            computation. Each rank takes it by its own clock, so it holds across machines.
        peak_memory_bytes: for each process, its peak so far.
        live_activations: for each rank, the most held at once.
        stage_seconds: [stages, 4]: median seconds of F, B, I, W of one micro-batch; 0 where a schedule has none.
    """

    bubble_fraction: float
    peak_memory_bytes: list[int]
    live_activations: list[int]
    stage_seconds: Tensor


def cost_numbers(pipeline: Pipeline, records: Records, process: int, num_processes: int) -> Tensor:
    """This process's share of the sum over processes that `read_cost` reads; float64.

    Args:
        pipeline: that just stepped.
        records: its records of that step.
        process, num_processes: which of how many processes this is.
    """
    ranks, stages = pipeline.num_ranks, pipeline.schedule.num_stages
    by_rank = torch.zeros(ranks, 3, dtype=torch.float64)  # busy seconds, first to last, live activations
    memory = torch.zeros(num_processes, dtype=torch.float64)
    by_stage = torch.zeros(stages, len(_OPS), dtype=torch.float64)
    memory[process] = peak_memory_bytes()
    for rank, rows in records:
        durations: dict[tuple[int, int], list[float]] = {}
        computed = [row for row in rows if row[0].op in _OPS]
        for action, start, end in computed:
            durations.setdefault((action.stage, _OPS.index(action.op)), []).append(end - start)
        by_rank[rank, 0] = sum(map(sum, durations.values()))
        by_rank[rank, 1] = computed[-1][2] - computed[0][1] if computed else 0.0
        by_rank[rank, 2] = pipeline.peak_live_activations[rank]
        for (stage, op), found in durations.items():
            by_stage[stage, op] += statistics.median(found) / len(pipeline.schedule.placement.replicas[stage])
    return torch.cat([by_rank.flatten(), memory, by_stage.flatten()])


def read_cost(numbers: Tensor, schedule: Schedule, num_processes: int) -> StepCost:
    """The inverse of `cost_numbers`, after the sum over processes."""
    ranks = schedule.num_ranks
    by_rank, memory, by_stage = torch.split(numbers, [3 * ranks, num_processes, schedule.num_stages * len(_OPS)])
    busy, seconds, live = by_rank.view(ranks, 3).unbind(1)
    return StepCost(
        bubble_fraction=float(1 - busy.mean() / seconds.max()),
        peak_memory_bytes=[int(value) for value in memory.tolist()],
        live_activations=[int(value) for value in live.tolist()],
        stage_seconds=by_stage.view(-1, len(_OPS)),
    )


def peak_memory_bytes() -> int:
    """The most memory this process has held: of its GPU if it uses one, else its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Predictor:
    """Simulates the program with the times that recent steps measured."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._recent: deque[Tensor] = deque(maxlen=_RECENT_STEPS)
        self._latency_seconds = 0.0

    def observe(self, cost: StepCost) -> None:
        self._recent.append(cost.stage_seconds)

    def observe_messages(self, records: Records) -> None:
        """Measure how long a message takes to a rank that waits for it; records of all ranks, one clock."""
        seconds = message_seconds(records)
        if seconds:
            self._latency_seconds = statistics.median(seconds)

    def predict(self) -> Timeline:
        """The step as it should go."""
        f, b, i, w = torch.stack(list(self._recent)).median(0).values.unbind(1)
        split = bool(i.any())
        costs = Costs(
            forward=tuple(f.tolist()),
            backward_input=tuple((i if split else b / 2).tolist()),
            backward_weight=tuple((w if split else b / 2).tolist()),
        )
        return simulate(self._program, costs, Network(latency_seconds=self._latency_seconds))


def message_seconds(records: Records) -> list[float]:
    """Seconds from the end of a computation to the end of the receive that already waited for its result.

    Negative differences (clocks of two machines) count as 0.
    """
    ends = {action: end for _, rows in records for action, _, end in rows}
    found = []
    for _, rows in records:
        for action, start, end in rows:
            if action.op is Op.RECV_F:
                producers = [action._replace(stage=action.stage - 1, op=Op.F)]
            elif action.op is Op.RECV_B:
                producers = [action._replace(stage=action.stage + 1, op=op) for op in (Op.B, Op.I)]
            else:
                continue
            sent = next((ends[producer] for producer in producers if producer in ends), None)
            if sent is not None and start <= sent:
                found.append(max(0.0, end - sent))
    return found
