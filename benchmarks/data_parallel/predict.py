"""What the simulator makes of a step: computing as measured with `ddp`, collectives as by themselves.

Processes and the threads of gloo share the cores of one machine: computations beside a collective lose what it takes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch.distributed as dist
from benchmarks.common.systems import Record
from benchmarks.common.workloads import Workload

import pipeloom as pl
from pipeloom.ir import DataAxis, DataStrategy, Schedule
from pipeloom.parallel.data.replica_group import ReplicaGroup, time_collectives
from pipeloom.passes import lower, merge_backwards, separate_units
from pipeloom.sim import Timeline
from pipeloom.sim.data_link import slowdown

NUM_PROCESSES = 4
_OPS = {pl.Op.UNSHARD: "gather", pl.Op.REDUCE_GRAD: "reduce"}


class Taken(NamedTuple):
    """What collectives take, in seconds: from start to end, and of this process's cores."""

    seconds: float
    cpu_seconds: float


def collective_seconds(mesh: pl.Mesh, workload: Workload) -> dict[str, Taken]:
    """What each strategy's gathers and reductions of all layers of this rank take, one after the other, float32.

    All ranks of the pipeline are at it at once, as in a step.
    """
    copies = ReplicaGroup(mesh)
    rank, num_ranks = mesh.coordinate("pp"), mesh.degree("pp")
    cut = workload.cut(num_ranks)
    start = sum(cut[:rank])
    layers = list(workload.model())[start : start + cut[rank]]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    found = {}
    for strategy in DataStrategy:
        for op in _OPS:
            if op is pl.Op.UNSHARD and strategy.shards_parameters and copies.shares_memory:  # read in place
                found[f"{strategy} {_OPS[op]}"] = Taken(0.0, 0.0)
                continue
            timed = time_collectives(copies, strategy, op, sizes, meet=dist.barrier, repeats=3)
            found[f"{strategy} {_OPS[op]}"] = Taken(sum(each[1] for each in timed), sum(each[2] for each in timed))
    return found


def computing(records: list[list[Record]]) -> dict[tuple[int, pl.Op], list[float]]:
    """The seconds of all computations of a step, by stage and op."""
    found: dict[tuple[int, pl.Op], list[float]] = defaultdict(list)
    for row in records:
        for action, start, end in row:
            if action.op in (pl.Op.F, pl.Op.B, pl.Op.I, pl.Op.W):
                found[action.stage, action.op].append(end - start)
    return found


def simulated(
    schedule: Schedule,
    seconds: Mapping[tuple[int, pl.Op], float],
    message_seconds: float,
    data: DataAxis | None,
    collectives: Mapping[str, float],
    units: Sequence[int],
    slowdown: float,
) -> Timeline:
    """The program that ran.

    Args:
        schedule: of one copy.
        seconds: of each stage's ops.
        message_seconds: from one rank to the next.
        data: None for one copy.
        collectives: seconds of each for a whole rank.
        units: of each stage, as many as are gathered and reduced.
        slowdown: what computations lose beside collectives.
    """
    ran = separate_units(merge_backwards(schedule))
    of_op = {op: tuple(seconds.get((s, op), 0.0) for s in range(schedule.num_stages)) for op in "FBIW"}
    halves = [tuple(x or b / 2 for x, b in zip(of_op[op], of_op["B"], strict=True)) for op in "IW"]
    chunks = schedule.num_stages / schedule.num_ranks
    other = {}
    if data is not None:
        other = {op: collectives[f"{data.strategy} {name}"] / chunks for op, name in _OPS.items()}
    whole = tuple(b or i + w for b, i, w in zip(of_op["B"], *halves, strict=True))
    costs = pl.Costs(
        forward=of_op["F"],
        backward=whole,
        backward_input=halves[0],
        backward_weight=halves[1],
        other=other,
        units=tuple(units) or None,
    )
    network = pl.Network(latency_seconds=message_seconds, data_slowdown=slowdown)
    return pl.simulate(lower(ran, data=data), costs, network)


class Predictions:
    """What is measured for the simulation, over the rounds of a run.

    Attributes:
        units: of each system's stages.
    """

    def __init__(self) -> None:
        self.units: dict[str, tuple[int, ...]] = {}
        self._computing: dict[str, dict[tuple[int, pl.Op], list[float]]] = defaultdict(lambda: defaultdict(list))
        self._collectives: dict[str, list[float]] = defaultdict(list)
        self._cores: dict[str, list[float]] = defaultdict(list)  # that a kind keeps busy, in all processes
        self._message_seconds: list[float] = []

    def add_records(self, name: str, records: list[list[Record]]) -> None:
        """Of one step of the system `name`, by process."""
        for key, seconds in computing(records).items():
            self._computing[name][key] += seconds

    def add_units(self, name: str, units: list[dict[int, int]]) -> None:
        """Of the stages of the system `name`, by process."""
        known = {stage: count for of_process in units for stage, count in of_process.items()}
        self.units[name] = tuple(known[stage] for stage in sorted(known))

    def add_pings(self, collectives: list[dict[str, Taken]], message_seconds: list[float]) -> None:
        """Collectives by process, and one-way times of messages."""
        for name in collectives[0]:
            self._collectives[name].append(max(of_process[name].seconds for of_process in collectives))
            self._cores[name].append(sum(each[name].cpu_seconds / (each[name].seconds or 1.0) for each in collectives))
        self._message_seconds += message_seconds

    @property
    def collectives(self) -> dict[str, float]:
        """Medians of the rounds."""
        return {name: median(seconds) for name, seconds in self._collectives.items()}

    def step_seconds(self, name: str, schedule: Schedule, data: DataAxis | None, computing_of: str) -> float:
        """Of a step of the system `name`, with computations as those of the system `computing_of`."""
        seconds = {key: median(found) for key, found in self._computing[computing_of].items()}
        message, units = median(self._message_seconds), self.units.get(name, ())
        return simulated(schedule, seconds, message, data, self.collectives, units, self._slowdown(data)).makespan

    def _slowdown(self, data: DataAxis | None) -> float:
        """What computations, one thread a process, lose beside the collectives of a data axis."""
        if data is None:
            return 0.0
        busy = max(median(self._cores[f"{data.strategy} {name}"]) for name in _OPS.values())
        return slowdown(NUM_PROCESSES, busy, len(os.sched_getaffinity(0)))
