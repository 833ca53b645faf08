"""Bytes and times of the collectives between data-parallel replicas, measured before the first step."""

import platform
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from pipeloom.common.cores import usable_cores
from pipeloom.ir import DataAxis, Granularity, Op
from pipeloom.parallel.data.replica_group import ReplicaGroup, time_collectives
from pipeloom.sim import Costs, Network
from pipeloom.sim.data_link import DataLink, TimedCollective, fit_data_link, gather_seconds, reduce_seconds, slowdown
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline

_MOST_BYTES = 32 << 20  # of a timed collective
_SMALL = 16  # the smaller size is this fraction of the larger one


@dataclass(frozen=True, kw_only=True)
class DataCosts:
    """Arguments of `pipeloom.sim.Costs`, by stage, and the link."""

    parameter_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    units: tuple[int, ...]
    link: DataLink

    def by_itself(self, data: DataAxis, costs: Costs) -> Costs:
        """Measured `costs` of computations without the slowdown by overlapped collectives.

        With collectives per micro-batch, all measured times include that slowdown: by all units but the one that is
        gathered before the computation and reduced after it. At most half of a time is attributed to it.
        """
        if data.granularity is not Granularity.MICROBATCH or not self.link.slowdown:
            return costs
        network = Network(**self.link.network())
        gathers, reductions = (
            [
                self.link.slowdown * (count - 1) * form(data, size / count, network)
                for size, count in zip(sizes, self.units, strict=True)
            ]
            for form, sizes in ((gather_seconds, self.parameter_bytes), (reduce_seconds, self.gradient_bytes))
        )
        if not data.strategy.shards_parameters:  # gathered once per step
            gathers = [0.0] * len(gathers)
        both = [a + b for a, b in zip(gathers, reductions, strict=True)]
        lost = {"forward": gathers, "backward": both, "backward_input": gathers, "backward_weight": reductions}
        less: dict[str, Any] = {
            kind: tuple(max(time / 2, time - each) for time, each in zip(getattr(costs, kind), seconds, strict=True))
            for kind, seconds in lost.items()
        }
        return replace(costs, **less)


def measure_data_costs(pipeline: Pipeline, group: Group) -> DataCosts:
    """Measure collectives; a collective call with the same result on all processes."""
    program = pipeline.program
    assert group.mesh is not None
    assert program.data is not None
    replicas = ReplicaGroup(group.mesh)
    stages = {stage: sizes for store in pipeline.state.stores.values() for stage, sizes in store.unit_bytes().items()}
    timed: list[TimedCollective] = []
    in_place = all(store.gathers_in_place for store in pipeline.state.stores.values())
    for index, op in enumerate((Op.UNSHARD, Op.REDUCE_GRAD)):
        if op is Op.UNSHARD and all(group.gather_json(in_place)):
            continue
        units = [unit[index] for sizes in stages.values() for unit in sizes]
        mean = min(_MOST_BYTES, sum(units) // max(1, len(units)))
        found = time_collectives(
            replicas,
            program.data.strategy,
            op,
            (max(1, mean // _SMALL), mean),
            device=group.device,
            meet=lambda: group.all_gather(b""),
            repeats=9,
        )
        timed += [TimedCollective(op, *each) for each in found]
    known = group.gather_json(
        {
            "stages": stages,
            "timed": timed,
            "host": platform.node(),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
        }
    )
    sizes = {int(stage): found for each in known for stage, found in each["stages"].items()}
    every = [sizes.get(stage, []) for stage in range(program.schedule.num_stages)]
    return DataCosts(
        parameter_bytes=tuple(float(sum(unit[0] for unit in stage)) for stage in every),
        gradient_bytes=tuple(float(sum(unit[1] for unit in stage)) for stage in every),
        units=tuple(max(1, len(stage)) for stage in every),
        link=_link(program.data, group, known),
    )


def _link(data: DataAxis, group: Group, known: list[dict[str, Any]]) -> DataLink:
    """The mean over processes; the slowdown of computations on CPUs is a mean over machines."""
    every = [TimedCollective(Op(op), *rest) for each in known for op, *rest in each["timed"]]
    mean = [
        TimedCollective(op, size, *(sum(column) / len(column) for column in zip(*found, strict=True)))
        for op in (Op.UNSHARD, Op.REDUCE_GRAD)
        for size in sorted({each.num_bytes for each in every if each.op is op})
        if (found := [(each.seconds, each.cpu_seconds) for each in every if (each.op, each.num_bytes) == (op, size)])
    ]
    lost = 0.0
    if group.device.type == "cpu":
        hosts = {each["host"] for each in known}
        lost = fmean(slowdown_of_host([each for each in known if each["host"] == host]) for host in hosts)
    return fit_data_link(data, mean, lost)


def slowdown_of_host(processes: list[dict[str, Any]]) -> float:
    """The slowdown on one host, from the largest collective of each of its processes that timed any."""
    timed = [[TimedCollective(*row) for row in each["timed"]] for each in processes]
    largest = [max(found, key=lambda one: one.num_bytes) for found in timed if found]
    busy = sum(one.cpu_seconds / one.seconds for one in largest)
    cores = max(each["cores"] for each in processes)
    return slowdown(sum(each["threads"] for each in processes), busy, cores)
