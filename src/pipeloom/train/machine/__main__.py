"""One process of a measurement: ``python -m pipeloom.train.machine FILE tiny|full``, started by `measure_machine`."""

import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.cores import usable_cores
from pipeloom.parallel import Precision
from pipeloom.plan.local.measured import Rates
from pipeloom.processes import launcher, rendezvous
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.train.machine.exchanges import measure_collectives, measure_messages
from pipeloom.train.machine.kernels import (
    TINY,
    Sizes,
    measure_attention,
    measure_elementwise,
    measure_kernel,
    measure_products,
    measure_update,
    seconds_of,
)
from pipeloom.train.machine.layers import measure_layers
from pipeloom.train.machine.measure import SMALL

_STEPS = 9  # of the small GPT


def measured_rates(member: launcher.Membership, sizes: Sizes, cores: int) -> dict[str, Any]:
    """The entry of `Rates` that the processes of a run find together, as JSON; every process calls it."""
    size = member.world_size
    found: dict[str, Any] = {"products": {}, "curves": {}, "seconds": {}}
    if size <= cores:
        found["products"] = measure_products(sizes)
        found["curves"] |= {"elementwise": measure_elementwise(sizes), **dict(measure_attention(sizes))}
        found["curves"]["update"] = measure_update(sizes, _adamw)
        found["seconds"] = {"kernel": measure_kernel(), **_layers(size)}
    found["probe"] = _probe()
    if size > 1:
        message, send, receive = measure_messages(member.rank, size, sizes.messages)
        curves, used = measure_collectives(size, sizes.messages)
        found["curves"] |= curves
        if message:
            found["curves"]["message"] = message
        found["seconds"] |= {"send": send, "receive": receive, "collectives": used}
    every = [json.loads(each) for each in all_gather_bytes(json.dumps(found).encode())] if size > 1 else [found]
    return {"processes": size, "threads": torch.get_num_threads(), **_mean(every)}


def _layers(processes: int) -> dict[str, float]:
    """Seconds of a block and of a step of a GPT so small that its kernels take next to nothing."""
    rates, threads = Rates(processes=processes, threads=1), torch.get_num_threads()
    torch.set_num_threads(1)  # which is timed by its CPU time
    layers = measure_layers(SMALL, [1], precision=Precision("fp32"), rates=rates, rounds=_STEPS)
    torch.set_num_threads(threads)
    row = layers.rows[1]
    (forward, *backward), (more, *others, _) = row.blocks[False], row.stage
    return {
        "block forward": forward,
        "block backward": sum(backward),
        "stage forward": more,
        "stage backward": sum(others),
        "step": layers.step_seconds,
    }


def _adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _probe() -> float:
    """CPU seconds of a product that fits into caches, to compare crowded cores with others."""
    x = torch.randn(128, 128)
    return seconds_of(lambda: x @ x, 0.05)


def _mean(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over processes of each number; a process without a table is ignored."""

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            names = dict.fromkeys(name for value in values for name in value)
            return {name: joined([value[name] for value in values if name in value]) for name in names}
        if isinstance(values[0], list | tuple):
            return [joined(list(each)) for each in zip(*values, strict=True)]
        return fmean(values)

    found: dict[str, Any] = joined(every)
    return found


def main() -> None:
    """Measure as one process, and write what all found."""
    member = launcher.membership(os.environ)
    assert member is not None
    with launcher.last_words(member):
        path, kind = sys.argv[1:]
        torch.set_num_threads(max(1, usable_cores() // member.world_size))
        if member.world_size > 1:
            rendezvous.join(member, "gloo")
        found = measured_rates(member, TINY if kind == "tiny" else Sizes(), usable_cores())
        if member.rank == 0:
            write_whole(Path(path), json.dumps(found))
        if member.world_size > 1:
            dist.barrier()
    launcher.leave(0)


main()
