"""Costs of a step: measured on every rank, summed in one collective, and compared with the simulator."""

import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.ir import Action, Op, Program, Schedule
from pipeloom.ir.action import RECEIVES, SENDS
from pipeloom.ir.text import parse_action
from pipeloom.ir.walk import in_background
from pipeloom.sim import Collective, Costs, Network, Timeline, simulate
from pipeloom.train.data_parallel_costs import DataCosts
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline

Records = Sequence[tuple[int, Sequence[tuple[Action, float, float]]]]
Collectives = Sequence[tuple[int, Sequence[tuple[str, str, float, float, int]]]]
Waits = Mapping[int, Mapping[Action, float]]
MessageKey = str | tuple[Op, int]
MessageTimes = dict[MessageKey, list[float]]

COMPUTATIONS = (Op.F, Op.B, Op.I, Op.W)
_MOVES = (Op.OFFLOAD, Op.RELOAD)
_RECENT_STEPS = 20  # number of steps in a median
_RECENT_MESSAGES = 5  # number of steps in a median of message times, and in a mean of simulated bubbles


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step on all ranks; with several replicas, the mean over them.

    Attributes:
        bubble_fraction: 1 - mean computing time of the ranks / longest time from a rank's first to its last
            computation or background transfer. Each rank uses its own clock, so it holds across machines.
        peak_memory_bytes: for each process, its peak so far; pipeline after pipeline, the ranks of each in order.
        live_activations: for each rank, its peak; equal in all pipelines.
        stage_seconds: [stages, 4]: median seconds of F, B, I, W of one micro-batch (of its slices, added up), averaged
            over the ranks with the stage; 0 where there is none.
        slice_factors: [2, slices]: what the slices of a micro-batch take over their mean, forward and backward; None
            where there is one.
    """

    bubble_fraction: float
    peak_memory_bytes: list[int]
    live_activations: list[int]
    stage_seconds: Tensor
    slice_factors: Tensor | None = None


def cost_numbers(pipeline: Pipeline, records: Records, group: Group) -> Tensor:
    """This process's share of the sum over processes that `read_cost` reads, from the records of a step; float64."""
    ranks, stages = pipeline.schedule.num_ranks, pipeline.schedule.num_stages
    by_rank = torch.zeros(ranks, 3, dtype=torch.float64)  # busy seconds, first to last, live activations
    memory = torch.zeros(group.size, dtype=torch.float64)
    slices = pipeline.schedule.num_slices
    by_stage = torch.zeros(
        2, stages, len(COMPUTATIONS), slices, dtype=torch.float64
    )  # medians, and how many ranks have one
    memory[group.place] = peak_memory_bytes()
    for rank, rows in records:
        durations: dict[tuple[int, int, int], list[float]] = {}
        waits = pipeline.waits[rank]
        for action, start, end in rows:
            if action.op in COMPUTATIONS:
                key = (action.stage, COMPUTATIONS.index(action.op), action.slice or 0)
                durations.setdefault(key, []).append(end - start - waits.get(action, 0.0))
        counted = [row for row in rows if row[0].op in COMPUTATIONS or in_background(row[0], pipeline.schedule)]
        by_rank[rank, 0] = sum(map(sum, durations.values()))
        by_rank[rank, 1] = max((end for _, _, end in counted), default=0) - min((s for _, s, _ in counted), default=0)
        by_rank[rank, 2] = pipeline.memory.peak_live_activations[rank]
        for key, found in durations.items():
            by_stage[0][key] += statistics.median(found)
            by_stage[1][key] += 1
    return torch.cat([by_rank.flatten(), memory, by_stage.flatten()])


def read_cost(numbers: Tensor, schedule: Schedule, num_processes: int) -> StepCost:
    """The inverse of `cost_numbers`, after the sum over processes."""
    replicas = max(1, num_processes // schedule.num_ranks)
    ranks, shape = schedule.num_ranks, (2, schedule.num_stages, len(COMPUTATIONS), schedule.num_slices)
    by_rank, memory, by_stage = torch.split(numbers, [3 * ranks, num_processes, math.prod(shape)])
    busy, seconds, live = by_rank.view(ranks, 3).unbind(1)
    medians, counts = by_stage.view(shape)
    seconds_of_slices = medians / counts.clamp_min(1)  # [stages, 4, slices]
    both = torch.stack([seconds_of_slices[:, 0].sum(0), seconds_of_slices[:, 1:].sum((0, 1))])  # forward and backward
    return StepCost(
        bubble_fraction=float(1 - busy.mean() / seconds.max()),
        peak_memory_bytes=[int(value) for value in memory.tolist()],
        live_activations=[int(value) // replicas for value in live.tolist()],
        stage_seconds=seconds_of_slices.sum(2),
        slice_factors=both / both.mean(1, keepdim=True).clamp_min(1e-12) if schedule.num_slices > 1 else None,
    )


def peak_memory_bytes() -> int:
    """Peak memory of this process: of its GPU if it uses one, else its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Predictor:
    """Simulates programs with the times that recent steps measured, and `data`, those of the link between replicas."""

    def __init__(self, data: DataCosts | None = None) -> None:
        self._data = data
        self._recent: deque[StepCost] = deque(maxlen=_RECENT_STEPS)
        self._messages: deque[MessageTimes] = deque(maxlen=_RECENT_MESSAGES)
        self._bubbles: deque[float] = deque(maxlen=_RECENT_MESSAGES)
        self._warm = False

    def observe(self, cost: StepCost) -> None:
        """Add the costs of a step. The first step, a warm-up, is dropped once there is another."""
        if not self._warm and self._recent:
            self._recent.clear()
            self._warm = True
        self._recent.append(cost)

    def stage_seconds(self) -> list[list[float]]:
        """Seconds of F, B, I and W of a micro-batch on each stage: medians of recent steps."""
        found: list[list[float]] = torch.stack([cost.stage_seconds for cost in self._recent]).median(0).values.tolist()
        return found

    def observe_records(self, program: Program, records: Records) -> None:
        """Add the times of a step of `program`; records of all ranks, on one clock."""
        self._messages.append(message_times(records))
        actions = [row for _, rows in records for row in rows]
        waits = any(in_background(action, program.schedule) for action, _, _ in actions)  # maybe inside computations
        if self._data is None and self._recent and not waits:
            single = {action: end - start for action, start, end in actions if action.op in COMPUTATIONS}
            costs = replace(self._costs(program), action_seconds=single)
            self._bubbles.append(simulate(program, costs, self._network(program)).bubble_fraction)

    def bubble_fraction(self, program: Program) -> float:
        """The predicted bubble of a step: the mean of simulations with each computation's own time in recent steps.

        Computations of one stage do not all take the same time, and those that take longer hold up other ranks: with
        the medians of `predict`, the bubble would be too small.
        """
        return statistics.fmean(self._bubbles) if self._bubbles else self.predict(program).bubble_fraction

    def predict(self, program: Program) -> Timeline:
        """The predicted timeline of a step or a stream, from medians of observed costs."""
        return simulate(program, self._costs(program), self._network(program))

    def _costs(self, program: Program) -> Costs:
        f, b, i, w = torch.stack([cost.stage_seconds for cost in self._recent]).median(0).values.unbind(1)
        found = [cost.slice_factors for cost in self._recent if cost.slice_factors is not None]
        forward, backward = map(tuple, torch.stack(found).median(0).values.tolist() if found else ((), ()))
        stages = range(program.schedule.num_stages)
        costs = Costs(  # a stage has seconds of B, of I and W, or of all three
            forward=tuple(f.tolist()),
            backward_input=tuple(torch.where(i > 0, i, b / 2).tolist()),
            backward_weight=tuple(torch.where(w > 0, w, b / 2).tolist()),
            backward=tuple(torch.where(b > 0, b, i + w).tolist()),
            slice_factors=(forward, backward) if found else None,
            other={
                Op.STEP: self._recent_median("update"),
                **{op: tuple(self._recent_median((op, stage)) for stage in stages) for op in _MOVES},
            },
        )
        if self._data is not None and program.data is not None:
            costs = replace(
                costs,
                parameter_bytes=self._data.parameter_bytes,
                gradient_bytes=self._data.gradient_bytes,
                units=self._data.units,
            )
            costs = self._data.by_itself(program.data, costs)
        return costs

    def _network(self, program: Program) -> Network:
        data: dict[str, Any] = {} if self._data is None or program.data is None else self._data.link.network()
        send, latency, receive = (self._recent_median(kind) for kind in ("send", "arrival", "receive"))
        return Network(latency_seconds=max(0.0, latency - receive), send_seconds=send, receive_seconds=receive, **data)

    def _recent_median(self, key: MessageKey) -> float:
        found = [value for times in self._messages for value in times.get(key, ())]
        return statistics.median(found) if found else 0.0


def cost_metrics(cost: StepCost, predictor: Predictor, program: Program, group: Group) -> dict[str, Any]:
    """The metrics of a cost; on process 0 also the prediction."""
    return {
        "bubble_fraction": cost.bubble_fraction,
        "predicted_bubble_fraction": predictor.bubble_fraction(program) if group.rank == 0 else math.nan,
        "peak_memory_bytes": cost.peak_memory_bytes,
        "live_activations": cost.live_activations,
    }


def message_times(records: Records) -> MessageTimes:
    """Seconds of the messages of one step, read from the records of all ranks.

    Keys are "send" (every SEND), "arrival" (from the end of a SEND to the end of the RECV that already waited for it),
    "receive" (every RECV whose message had been sent before), "update" (every STEP inside the program), and op and
    stage of every OFFLOAD and RELOAD. Negative differences (clocks of two machines) count as 0.
    """
    ends = {action: end for _, rows in records for action, _, end in rows if action.op in SENDS}
    times: MessageTimes = {}
    for _, rows in records:
        for action, start, end in rows:
            key: MessageKey | None = None
            seconds = end - start
            if action.op in SENDS:
                key = "send"
            elif action.op is Op.STEP:
                key = "update"
            elif action.op in _MOVES:
                key = (action.op, action.stage)
            elif action.op in RECEIVES:
                sent = ends.get(action.other_end())
                if sent is not None:  # of a long stream only the last records are there
                    key = "arrival" if start <= sent else "receive"
                    seconds = max(0.0, end - sent) if start <= sent else seconds
            if key is not None:
                times.setdefault(key, []).append(seconds)
    return times


def gathered_waits(group: Group, waits: Waits, num_ranks: int) -> list[float]:
    """The waits inside computations per rank of the first replica; a collective call."""
    own = {
        rank: math.fsum(seconds for action, seconds in found.items() if action.op in COMPUTATIONS)
        for rank, found in waits.items()
        if group.leads
    }
    gathered: dict[str, float] = {}
    for each in group.gather_json(own):
        gathered |= each
    return [gathered.get(str(rank), 0.0) for rank in range(num_ranks)]


def gathered_collectives(group: Group, collectives: Collectives, num_ranks: int) -> list[list[Collective]]:
    """The collectives inside actions, per rank of the first replica, on every process; a collective call."""
    gathered: dict[str, list[list[Any]]] = {}
    for each in group.gather_json({rank: row for rank, row in collectives if group.leads}):
        gathered |= each
    return [[Collective(*row) for row in gathered.get(str(rank), ())] for rank in range(num_ranks)]


def gathered_records(group: Group, records: Records) -> Records:
    """The records of all ranks of the first replica, by rank, on every process; `records` are this one's."""
    shown = records if group.leads else []
    own = [(rank, [(str(action), start, end) for action, start, end in rows]) for rank, rows in shown]
    gathered = [item for each in group.gather_json(own) for item in each]
    return [
        (rank, [(parse_action(action), start, end) for action, start, end in rows]) for rank, rows in sorted(gathered)
    ]
