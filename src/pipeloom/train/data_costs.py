"""What goes over the link between copies of a pipeline, and what that takes: measured before the first step."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from pipeloom.ir import Granularity, Op
from pipeloom.parallel.copies import Copies
from pipeloom.parallel.time_collectives import time_collectives
from pipeloom.runtime import Pipeline
from pipeloom.sim.data_link import DataLink, TimedCollective, fit_data_link, slowdown
from pipeloom.train.group import Group

_MOST_BYTES = 32 << 20  # of a collective that is timed: it is made of nothing else
_SMALL = 16  # and of how many times less bytes the other size is


@dataclass(frozen=True, kw_only=True)
class DataCosts:
    """Arguments of `pipeloom.sim.Costs`, by stage, and the link."""

    parameter_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    units: tuple[int, ...]
    link: DataLink


def measure_data_costs(pipeline: Pipeline, group: Group) -> DataCosts | None:
    """Every process calls it; all get the same. None where there is one copy."""
    program = pipeline.program
    if group.mesh is None or program.data is None or program.data.degree == 1:
        return None
    copies = Copies(group.mesh)
    stages = {stage: sizes for store in pipeline.stores.values() for stage, sizes in store.unit_bytes().items()}
    timed: list[TimedCollective] = []
    for index, op in enumerate((Op.UNSHARD, Op.REDUCE_GRAD)):
        units = [unit[index] for sizes in stages.values() for unit in sizes]
        mean = min(_MOST_BYTES, sum(units) // max(1, len(units)))
        found = time_collectives(
            copies,
            program.data.strategy,
            op,
            (max(1, mean // _SMALL), mean),
            device=group.device,
            meet=lambda: group.all_gather(b""),
        )
        timed += [TimedCollective(op, *each) for each in found]
    known = [json.loads(each) for each in group.all_gather(json.dumps(_answer(stages, timed)).encode())]
    link = _link(pipeline, group, known)
    sizes = {int(stage): found for each in known for stage, found in each["stages"].items()}
    every = [sizes.get(stage, []) for stage in range(program.schedule.num_stages)]
    return DataCosts(
        parameter_bytes=tuple(float(sum(unit[0] for unit in stage)) for stage in every),
        gradient_bytes=tuple(float(sum(unit[1] for unit in stage)) for stage in every),
        units=tuple(max(1, len(stage)) for stage in every),
        link=link,
    )


def _answer(stages: dict[int, list[tuple[int, int]]], timed: list[TimedCollective]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "stages": stages,
        "timed": timed,
        "host": platform.node(),
        "cores": cores,
        "threads": torch.get_num_threads(),
    }


def _link(pipeline: Pipeline, group: Group, known: list[dict[str, Any]]) -> DataLink:
    """The mean over processes, and over machines of what computations on CPUs lose.

    Where collectives run beside every computation, their measured times have the loss already.
    """
    data = pipeline.program.data
    assert data is not None
    every = [TimedCollective(Op(op), *rest) for each in known for op, *rest in each["timed"]]
    mean = [
        TimedCollective(op, size, *(sum(column) / len(column) for column in zip(*found, strict=True)))
        for op in (Op.UNSHARD, Op.REDUCE_GRAD)
        for size in sorted({each.num_bytes for each in every if each.op is op})
        if (found := [(each.seconds, each.cpu_seconds) for each in every if (each.op, each.num_bytes) == (op, size)])
    ]
    lost = 0.0
    if group.device.type == "cpu" and data.granularity is not Granularity.MICROBATCH:
        losses = [_loss([each for each in known if each["host"] == host]) for host in {e["host"] for e in known}]
        lost = sum(losses) / len(losses)
    return fit_data_link(data, mean, lost)


def _loss(processes: list[dict[str, Any]]) -> float:
    """On one machine: of collectives, each process's largest count."""
    busy = 0.0
    for each in processes:
        largest = max((TimedCollective(*timed) for timed in each["timed"]), key=lambda timed: timed.num_bytes)
        busy += largest.cpu_seconds / largest.seconds
    cores = max(each["cores"] for each in processes)
    return slowdown(sum(each["threads"] for each in processes), busy, cores)
