"""Systems under test: what they are called, how a process builds them, how a step is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.links import EmulatedLinks
from benchmarks.common.peers import DeepSpeedPipeline, TorchPipelining, parameters_of
from benchmarks.common.ping_pong import ping_pong
from benchmarks.common.pipes import PipeProgram
from benchmarks.common.processes import Crew, run_first
from benchmarks.common.reference import BareStages, Sequential, compare, judge
from benchmarks.common.workloads import Workload
from pipeloom.ir import Action, Program, Schedule

Record = tuple[Action, float, float]


class Pipeloom:
    """`pipeloom.Pipeline` with a schedule, or the one of this name; "auto": the fastest plan of those predicted."""

    def __init__(
        self,
        workload: Workload,
        schedule: str | Schedule,
        num_ranks: int,
        transport: str = "auto",
        spin_seconds: float | None = None,
        links: EmulatedLinks | None = None,
        slices: Sequence[int] | None = None,
    ) -> None:
        import pipeloom as pl

        model = workload.model()
        if schedule == "auto":
            self._run(model, workload, planned(workload, num_ranks))
            return
        if isinstance(schedule, str):
            plan = pl.schedules.build(schedule, num_ranks=num_ranks, num_microbatches=workload.num_microbatches)
        else:
            plan = schedule
        chosen: Any = transport
        if links is not None or spin_seconds is not None:
            from benchmarks.common.delayed_transport import DelayedTransport
            from pipeloom.processes.collectives import all_gather_bytes
            from pipeloom.transport.shared_memory import SharedMemoryTransport

            chosen = SharedMemoryTransport(dist.get_rank(), all_gather_bytes, spin_seconds=spin_seconds)
            if links is not None:
                chosen = DelayedTransport(chosen, links)
        self._run(model, workload, plan, cut=workload.cut(plan.num_stages), transport=chosen, slices=slices)

    def _run(self, model: nn.Module, workload: Workload, plan: Any, **options: Any) -> None:
        import pipeloom as pl

        self._pipe = pl.Pipeline(model, plan, loss_fn=workload.loss, **options)
        self._batch = workload.batch()
        self.parameters = parameters_of(model, self._pipe.parameters())

    def step(self) -> Tensor | None:
        return self._pipe.step(*self._batch)

    def records(self) -> list[Record]:
        """Every action of this rank's last step with its start and end."""
        ((_, rows),) = self._pipe.records
        return rows

    def close(self) -> None:
        self._pipe.close()


def planned(workload: Workload, num_ranks: int) -> Any:
    """The fastest plan for a pipeline of these ranks, from layers that rank 0 measures and then by steps of all."""
    import pipeloom as pl

    found, batch = [], workload.batch()
    if dist.get_rank() == 0:
        size = len(batch[0]) // workload.num_microbatches
        found = pl.plans(
            workload.model(),
            tuple(each[:size] for each in batch),
            cluster="local",
            devices=num_ranks,
            global_batch_size=len(batch[0]),
            loss_fn=workload.loss,
            fix={"pipeline": num_ranks, "microbatches": workload.num_microbatches},
            forbid="recompute,offload",
        )
    plan = pl.fastest_plan(
        found,
        lambda plan: pl.Pipeline(workload.model(), plan, loss_fn=workload.loss),
        lambda pipe: pipe.step(*batch),
    )
    if dist.get_rank() == 0:
        print(f"plan: {'; '.join(plan.why)} {plan.make_schedule()}", flush=True)
    return plan


@dataclass(frozen=True, kw_only=True)
class System:
    """A system under test, as data.

    Attributes:
        kind: "pipeloom", "torch", "deepspeed", "sequential", "bare" or "pipes".
        schedule: "gpipe", "1f1b", ... where `kind` has schedules; for pipeloom also a schedule itself, or "auto"; for
            pipes the program that ranks run.
        options: further arguments of the class behind `kind`.
        latency_seconds: of emulated links; None for the links as they are.
    """

    kind: str
    schedule: str | Schedule | Program = ""
    options: Mapping[str, Any] | None = None
    latency_seconds: float | None = None


class Stamp(NamedTuple):
    """One step of one rank, in seconds of clocks; the first two are the same clock on all ranks of a machine."""

    start: float
    end: float
    thread_cpu: float  # of the thread that called step
    process_cpu: float  # of all threads of the process


class Bench:
    """The subject of a crew: builds systems on one rank and runs their steps.

    Args:
        rank: of this process in its crew.
        num_ranks: of the pipeline; with one process, all of them may live here.
        scratch: a directory that all ranks share.
    """

    def __init__(self, rank: int, num_ranks: int, scratch: str) -> None:
        self._rank, self._num_ranks, self._scratch = rank, num_ranks, Path(scratch)
        self._systems: dict[str, Any] = {}

    def build(self, name: str, system: System, workload: Workload) -> None:
        options = dict(system.options or {})
        if system.latency_seconds is not None:
            path = self._scratch / f"{name.replace(' ', '-').replace('/', '-')}.links"
            options["links"] = EmulatedLinks(path, self._num_ranks, self._rank, system.latency_seconds)
        built: Any
        if system.kind == "pipeloom":
            assert not isinstance(system.schedule, Program)
            built = Pipeloom(workload, system.schedule, self._num_ranks, **options)
        elif system.kind == "torch":
            built = TorchPipelining(workload, str(system.schedule), **options)
        elif system.kind == "deepspeed":
            built = DeepSpeedPipeline(workload)
        elif system.kind == "sequential":
            built = Sequential(workload, **options)
        elif system.kind == "bare":
            built = BareStages(workload)
        elif system.kind == "pipes":
            assert isinstance(system.schedule, Program)
            built = PipeProgram(workload, system.schedule, self._rank, self._scratch / name.replace(" ", "-"))
        else:
            raise ValueError(f"unknown kind of system {system.kind!r}")
        self._systems[name] = built

    def check(self, name: str, reference: str) -> dict[str, float]:
        """Two steps from zero gradients; the errors of the second against the reference."""
        system = self._systems[name]
        for _ in range(2):  # the first may allocate, connect and infer shapes
            self._zero_gradients(system)
            loss = system.step()
        return compare(loss, system.parameters, Path(reference))

    def run_steps(self, name: str, count: int) -> list[Stamp]:
        """`count` steps, each after a barrier and from zero gradients; the optimizer is no part of it."""
        system = self._systems[name]
        stamps = []
        for _ in range(count):
            self._zero_gradients(system)
            if dist.is_initialized():
                dist.barrier()
            thread, process, start = time.thread_time(), time.process_time(), time.monotonic()
            system.step()
            end = time.monotonic()
            stamps.append(Stamp(start, end, time.thread_time() - thread, time.process_time() - process))
        return stamps

    def records(self, name: str) -> list[Record]:
        """What this rank did when in the last step of a pipeloom system (seconds of a clock that all ranks share)."""
        found: list[Record] = self._systems[name].records()
        return found

    def ping_pong(self, count: int, wait_seconds: float) -> tuple[list[float], list[float]]:
        return ping_pong(self._rank, self._num_ranks, count, wait_seconds)

    def run_first(self) -> bool:
        """`run_first` for all threads of this process."""
        return all(run_first(int(thread)) for thread in os.listdir("/proc/self/task"))

    def close(self) -> None:
        for system in self._systems.values():
            system.close()

    @staticmethod
    def _zero_gradients(system: Any) -> None:
        for parameter in system.parameters.values():
            parameter.grad = None


def build_checked(crew: Crew, name: str, system: System, workload: Workload, reference: Path) -> float:
    """Build `system` on every rank of `crew` and compare its results with the reference; the largest error.

    Systems with emulated waits are compared as they are: waiting changes no number.
    """
    crew.call("build", name, system, workload)
    return judge(name, crew.call("check", name, str(reference)), workload)


def step_seconds(stamps_by_rank: Sequence[Sequence[Stamp]]) -> list[float]:
    """For each step, from the first rank's start to the last rank's end."""
    return [max(s.end for s in step) - min(s.start for s in step) for step in zip(*stamps_by_rank, strict=True)]
