"""What the simulator makes of a step: computing as measured with `ddp`, collectives as by themselves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist
from benchmarks.common.systems import Record
from benchmarks.common.workloads import Workload

import pipeloom as pl
from pipeloom.ir import DataAxis, Schedule
from pipeloom.parallel.copies import Copies
from pipeloom.passes import lower, merge_backwards, separate_units
from pipeloom.sim import Timeline

NUM_COPIES = 2
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


def collective_seconds(mesh: pl.Mesh, workload: Workload, repeats: int = 3) -> dict[str, float]:
    """What one collective of each kind takes for all layers of this rank, float32, all ranks of the pipeline at once.

    Layers follow one another without waiting, as in a step. Medians; of each, when the last process is through.
    """
    copies = Copies(mesh)
    rank, num_ranks = mesh.coordinate("pp"), mesh.degree("pp")
    cut = workload.cut(num_ranks)
    start = sum(cut[:rank])
    layers = workload.model()[start : start + cut[rank]]
    sizes = [sum(p.numel() for p in layer.parameters()) // copies.degree * copies.degree for layer in layers]
    values = [torch.zeros(size) for size in sizes]
    own = [torch.zeros(size // copies.degree) for size in sizes]
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(1 + repeats):
        for name in _COLLECTIVES:
            collective = getattr(copies, name)
            dist.barrier()
            with _timed(seconds[name]):
                arguments = zip(values, own, strict=True) if name in ("all_gather", "reduce_scatter") else zip(values)
                for wait in [collective(*given) for given in arguments]:
                    wait()
    return {name: median(found[1:]) for name, found in seconds.items()}


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    begin = time.monotonic()
    yield
    dist.barrier()
    seconds.append(time.monotonic() - begin)


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
) -> Timeline:
    """The program that ran.

    Args:
        schedule: of one copy.
        seconds: of each stage's ops.
        message_seconds: from one rank to the next.
        data: None for one copy.
        collectives: as from `collective_seconds`, each for a whole rank.
    """
    ran = separate_units(merge_backwards(schedule))
    of_op = {op: tuple(seconds.get((s, op), 0.0) for s in range(schedule.num_stages)) for op in "FBIW"}
    halves = [tuple(x or b / 2 for x, b in zip(of_op[op], of_op["B"], strict=True)) for op in "IW"]
    chunks = schedule.num_stages / schedule.num_ranks
    other = {}
    if data is not None:
        gather, reduce = _used(data)
        other = {
            pl.Op.UNSHARD: collectives[gather] / chunks if gather else 0.0,
            pl.Op.REDUCE_GRAD: collectives[reduce] / chunks,
        }
    whole = tuple(b or i + w for b, i, w in zip(of_op["B"], *halves, strict=True))
    costs = pl.Costs(
        forward=of_op["F"], backward=whole, backward_input=halves[0], backward_weight=halves[1], other=other
    )
    return pl.simulate(lower(ran, data=data), costs, pl.Network(latency_seconds=message_seconds))


def _used(data: DataAxis) -> tuple[str, str]:
    """The collectives that gather parameters and reduce gradients."""
    if data.strategy == "ddp":
        return "", "all_reduce"
    return ("broadcast", "reduce") if data.strategy == "parameter-server" else ("all_gather", "reduce_scatter")


class Predictions:
    """What is measured for the simulation, over the rounds of a run."""

    def __init__(self) -> None:
        self._computing: dict[str, dict[tuple[int, pl.Op], list[float]]] = defaultdict(lambda: defaultdict(list))
        self._collectives: dict[str, list[float]] = defaultdict(list)
        self._message_seconds: list[float] = []

    def add_records(self, name: str, records: list[list[Record]]) -> None:
        """Of one step of the system `name`, by process."""
        for key, seconds in computing(records).items():
            self._computing[name][key] += seconds

    def add_pings(self, collectives: list[dict[str, float]], message_seconds: list[float]) -> None:
        """Collectives by process, and one-way times of messages."""
        for name in _COLLECTIVES:
            self._collectives[name].append(max(of_process[name] for of_process in collectives))
        self._message_seconds += message_seconds

    @property
    def collectives(self) -> dict[str, float]:
        """Medians of the rounds."""
        return {name: median(seconds) for name, seconds in self._collectives.items()}

    def step_seconds(self, name: str, schedule: Schedule, data: DataAxis | None) -> float:
        """Of a step of this schedule and data axis, with computations as those of the system `name`."""
        seconds = {key: median(found) for key, found in self._computing[name].items()}
        message = median(self._message_seconds)
        return simulated(schedule, seconds, message, data, self.collectives).makespan
