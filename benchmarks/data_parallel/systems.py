"""Copies of a pipeline, in pipeloom and its peers: a step, an update, and whole weights to compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from benchmarks.common.peers import DeepSpeedPipeline, TorchPipelining
from benchmarks.common.ping_pong import ping_pong
from benchmarks.common.systems import Record
from benchmarks.common.workloads import Workload
from benchmarks.data_parallel.predict import Taken, collective_seconds
from benchmarks.data_parallel.workload import NUM_UPDATES, Part, compare, make_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pipeloom import schedules
from pipeloom.ir import DataAxis, Schedule
from pipeloom.parallel import DataParallel, Mesh
from pipeloom.training import Pipeline


@dataclass(frozen=True, kw_only=True)
class System:
    """A system under test, as data; its processes are `pp` times `dp`.

    Attributes:
        kind: "pipeloom", "torch" or "deepspeed".
        schedule: by its name in pipeloom.
        data: for pipeloom a strategy, with a granularity behind a slash if it is not "step"; for torch "ddp", "fsdp"
            (parameters are gathered once a step) or "fsdp-reshard" (for every forward and backward); for DeepSpeed
            "ddp" or "zero1".
    """

    kind: str
    schedule: str
    pp: int
    dp: int
    data: str

    @property
    def crew(self) -> str:
        """Whose processes it runs in: what frees parameters has others, as it tells malloc to give memory back."""
        return "pipeloom zero3" if self.kind == "pipeloom" and self.data.startswith("zero3") else self.kind

    def pipeline(self, workload: Workload) -> tuple[Schedule, DataAxis | None]:
        """The schedule of one copy and, of several, what they share."""
        num_microbatches = workload.num_microbatches // self.dp
        schedule = schedules.build(self.schedule, num_ranks=self.pp, num_microbatches=num_microbatches)
        return schedule, self.options().axis(self.dp) if self.dp > 1 else None

    def options(self) -> DataParallel:
        """Of pipeloom."""
        strategy, _, granularity = self.data.partition("/")
        return DataParallel(strategy, granularity=granularity or None)


class Pipeloom:
    """`pipeloom.Pipeline` on a mesh."""

    def __init__(self, workload: Workload, system: System) -> None:
        mesh = Mesh(pp=system.pp, dp=system.dp)
        part = Part(whole=workload, index=mesh.coordinate("dp"), count=system.dp)
        schedule, _ = system.pipeline(workload)
        self._pipe = Pipeline(
            part.model(),
            schedule,
            loss_fn=part.loss,
            cut=part.cut(schedule.num_stages),
            mesh=mesh,
            data=system.options(),
        )
        self._batch = part.batch()
        self._optimizer = make_optimizer(list(self._pipe.parameters()))

    def step(self) -> Tensor | None:
        return self._pipe.step(*self._batch)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return self._pipe.state_dict()

    def records(self) -> list[Record]:
        """Every action of this rank's last step with its start and end."""
        ((_, rows),) = self._pipe.records
        return rows

    def units(self) -> dict[int, int]:
        """Of each stage, how many are gathered and reduced; nothing of one copy."""
        (store,) = self._pipe.state.stores.values()
        return {stage: len(units) for stage, units in store.unit_bytes().items()}

    def close(self) -> None:
        self._pipe.close()


class Torch:
    """torch.distributed.pipelining with DDP or `fully_shard` around every stage, as documented."""

    def __init__(self, workload: Workload, system: System) -> None:
        mesh = init_device_mesh("cpu", (system.dp, system.pp), mesh_dim_names=("dp", "pp"))
        part = Part(whole=workload, index=mesh.get_local_rank("dp"), count=system.dp)

        def wrap(stage: nn.Sequential) -> nn.Module:
            return _sharded(stage, mesh, system.data) if system.dp > 1 else stage

        self._pipeline = TorchPipelining(part, system.schedule, group=mesh.get_group("pp"), wrap=wrap)
        self._optimizer = make_optimizer(list(self._pipeline.parameters.values()))

    def step(self) -> Tensor | None:
        return self._pipeline.step()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in self._pipeline.parameters.items()
        }

    def close(self) -> None:
        pass


def _sharded(stage: nn.Sequential, mesh: DeviceMesh, data: str) -> nn.Module:
    if data == "ddp":
        return nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    from torch.distributed.fsdp import fully_shard

    reshard = data == "fsdp-reshard"
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
    return fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=reshard)


class DeepSpeed:
    """`PipelineModule` with copies; `train_batch` is step and update in one."""

    def __init__(self, workload: Workload, system: System) -> None:
        part = Part(whole=workload, index=dist.get_rank() % system.dp, count=system.dp)  # its order of processes
        self._pipeline = DeepSpeedPipeline(
            part, num_stages=system.pp, optimizer=make_optimizer, zero_stage=1 if system.data == "zero1" else 0
        )

    def step(self) -> Tensor | None:
        return self._pipeline.step()

    def update(self) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._pipeline.parameters.items()}

    def close(self) -> None:
        pass


_KINDS = {"pipeloom": Pipeloom, "torch": Torch, "deepspeed": DeepSpeed}


class Stamp(NamedTuple):
    """One step of one process, in seconds of a clock that all of them share."""

    start: float
    gradients: float  # when `step` returned
    end: float  # when the update had been made too
    cpu: float  # of all threads of the process, from start to end


class ReplicaGroup:
    """The subject of a crew: builds systems on one process and runs their steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._mesh: Mesh | None = None
        self._systems: dict[str, Any] = {}

    def build(self, name: str, system: System, workload: Workload) -> None:
        self._systems[name] = _KINDS[system.kind](workload, system)

    def check(self, name: str, workload: Workload, reference: str) -> tuple[list[float | None], dict[str, float]]:
        """The losses of the first updates, and the errors of the weights after them."""
        system = self._systems[name]
        losses = []
        for _ in range(NUM_UPDATES):
            loss = system.step()
            losses.append(None if loss is None else float(loss))
            system.update()
        return losses, compare(workload, system.weights(), Path(reference))

    def run_steps(self, name: str, count: int) -> list[Stamp]:
        """`count` steps with updates, each after a barrier."""
        system = self._systems[name]
        stamps = []
        for _ in range(count):
            dist.barrier()
            cpu, start = time.process_time(), time.monotonic()
            system.step()
            gradients = time.monotonic()
            system.update()
            stamps.append(Stamp(start, gradients, time.monotonic(), time.process_time() - cpu))
        return stamps

    def records(self, name: str) -> list[Record]:
        """What this process did when in the last step of a pipeloom system."""
        found: list[Record] = self._systems[name].records()
        return found

    def units(self, name: str) -> dict[int, int]:
        """Of each stage of this process of a pipeloom system, as many as are gathered and reduced."""
        found: dict[int, int] = self._systems[name].units()
        return found

    def collectives(self, workload: Workload) -> dict[str, Taken]:
        """What collectives of two copies of a pipeline of two ranks take by themselves."""
        if self._mesh is None:
            self._mesh = Mesh(pp=2, dp=2)
        return collective_seconds(self._mesh, workload)

    def ping_pong(self, count: int) -> tuple[list[float], list[float]]:
        return ping_pong(self._rank, dist.get_world_size(), count, wait_seconds=0.005)

    def close(self) -> None:
        for system in self._systems.values():
            system.close()


def step_seconds(stamps_by_rank: Sequence[Sequence[Stamp]], *, update: bool) -> list[float]:
    """For each step, from the first process's start to when the last has its gradients, or has made the update."""
    return [
        max(s.end if update else s.gradients for s in step) - min(s.start for s in step)
        for step in zip(*stamps_by_rank, strict=True)
    ]
