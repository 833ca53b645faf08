"""Ranks that are processes and share the device, over the plain loop in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch.distributed as dist
from benchmarks.common.processes import Crew
from benchmarks.common.statistics import ratio
from benchmarks.gpu.subject import Figure, Machine, Sizes, gradients_of, largest_error, medians, plain_loop, single

import pipeloom as pl
from pipeloom.models import loss_fn

APART = "apart"


class Rank:
    """The subject of a crew: one rank of a pipeline, or rank 0 alone with the plain loop.

    Args:
        rank: of this process.
        sizes: of the model.
        machine: where it runs.
        schedule: its name in the table; None: the plain loop; "apart": the plain loop over this process's share of the
            micro-batches, without a message to the others.
        transport: of the pipeline.
    """

    def __init__(self, rank: int, sizes: Sizes, machine: Machine, schedule: str | None, transport: str) -> None:
        self._machine, self._model = machine, sizes.model(machine.device)
        self._inputs, self._targets = batch = sizes.batch(machine.device)
        self._plain = plain_loop(self._model, *batch, sizes.microbatches)
        self._pipe: pl.Pipeline | None = None
        self.error = 0.0
        self._meets = schedule is not None
        if schedule == APART:
            own = slice(rank, sizes.microbatches, dist.get_world_size())
            pieces = [value.unflatten(0, (sizes.microbatches, -1))[own].flatten(0, 1) for value in batch]
            count = len(range(sizes.microbatches)[own])
            self._plain = plain_loop(self._model, pieces[0], pieces[1], count)
        if schedule in (None, APART):
            return
        wanted = gradients_of(self._model, self._plain)
        ranks = dist.get_world_size()
        program = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=sizes.microbatches)
        self._pipe = pl.Pipeline(self._model, program, loss_fn=loss_fn, transport=transport)
        own = {id(parameter) for parameter in self._pipe.parameters()}
        held = {name for name, parameter in self._model.named_parameters() if id(parameter) in own}
        assert held, f"rank {rank} holds no parameters"
        found = gradients_of(self._model, self._run)
        self.error = largest_error({name: wanted[name] for name in held}, {name: found[name] for name in held})
        del wanted, found
        machine.free()  # what the plain loop took, for the other processes

    def _run(self) -> object:
        return self._plain() if self._pipe is None else self._pipe.step(self._inputs, self._targets)

    def largest_error(self) -> float:
        """Of the gradients of this rank."""
        return self.error

    def step(self) -> tuple[float, float]:
        """When it began and ended, on a clock that all processes share."""
        self._model.zero_grad()
        self._machine.synchronize()
        if self._meets:
            dist.barrier()
        start = time.monotonic()
        self._run()
        self._machine.synchronize()
        return start, time.monotonic()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


def processes(machine: Machine) -> Iterator[Figure]:
    """2 and 4 ranks, each a process, on one device."""
    transport = "cuda-ipc" if machine.device.type == "cuda" else "shared-memory"
    sizes = Sizes(layers=8, width=2048, heads=16, length=2048, samples=2, microbatches=8, vocabulary=16384).on(machine)
    kinds = [(APART, 2), ("1f1b", 2), ("zb-h1", 2), (APART, 4), ("1f1b", 4)]
    with ExitStack() as stack:

        def crew(name: str, num_ranks: int, schedule: str | None) -> Crew:
            made = Crew(name, num_ranks, Rank, sizes, machine, schedule, transport, timeout_seconds=60.0)
            return stack.enter_context(made)

        crews = {"plain": crew("plain", 1, None)}
        crews |= {f"{name}, {num_ranks} processes": crew(name, num_ranks, name) for name, num_ranks in kinds}
        errors = {name: max(each.call("largest_error")) for name, each in crews.items()}
        names, seconds = list(crews), {name: list[float]() for name in crews}
        for k in range(-1, machine.rounds):
            if k >= 2 and time.monotonic() > machine.deadline:
                break
            for name in names[k % len(names) :] + names[: k % len(names)]:
                stamps = crews[name].call("step")
                if k >= 0:
                    seconds[name].append(max(end for _, end in stamps) - min(start for start, _ in stamps))
    yield Figure("processes", f"{sizes}: ms per plain step", medians(seconds["plain"]), "{:.1f}")
    for name in names[1:]:
        over = ratio(seconds[name], seconds["plain"])
        if name.startswith(APART):
            yield Figure("processes", f"{name}, unrelated: time over plain", over)
            continue
        limit = seconds[f"{APART},{name.partition(',')[2]}"]
        yield Figure("processes", f"{name}: time over plain", over, target=1.05)
        yield Figure("processes", f"{name}: time over unrelated ones", ratio(seconds[name], limit), target=1.03)
        yield Figure("processes", f"{name}: difference of gradients", single(errors[name]), "{:.1e}")
