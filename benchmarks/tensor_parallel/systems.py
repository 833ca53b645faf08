"""Systems under test: the same model cut by pipeloom and by torch's DTensor, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common.reference import Sequential
from benchmarks.tensor_parallel.workload import Sizes
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.parallel.placed import placed_block

# By name in the whole model: this rank's gradient, and of the whole gradient the block that it should be.
Gradients = Iterable[tuple[str, Tensor | None, Any]]


def whole(full: Tensor) -> Tensor:
    return full


class OneProcess(Sequential):
    """Gradient accumulation without ranks."""

    def gradients(self) -> Gradients:
        return [(name, parameter.grad, whole) for name, parameter in self.parameters.items()]

    def waited(self) -> float:
        return 0.0


class PipeloomTensor:
    """`pipeloom.parallelize`, and a `Pipeline` over `pp` ranks."""

    def __init__(self, sizes: Sizes, *, pp: int = 1, sequence: bool = False) -> None:
        self.mesh = pl.Mesh(pp=pp, tp=dist.get_world_size() // pp)
        model = pl.parallelize(sizes.model(), self.mesh, sizes.plan(), sequence=sequence)
        schedule = pl.schedules.one_f_one_b(num_ranks=pp, num_microbatches=sizes.num_microbatches)
        self._pipe = pl.Pipeline(model, schedule, loss_fn=sizes.loss, cut=sizes.cut(pp), mesh=self.mesh)
        self._batch = sizes.batch()
        self.parameters = dict(self._pipe.named_parameters())

    def step(self) -> Tensor | None:
        return self._pipe.step(*self._batch)

    def gradients(self) -> Gradients:
        for name, parameter in self.parameters.items():
            block = placed_block(parameter)
            yield name, parameter.grad, whole if block is None else block.cut

    def waited(self) -> float:
        return sum(traffic.seconds for traffic in self.mesh.meter.traffic.values())

    def close(self) -> None:
        self._pipe.close()
        self.mesh.close()


class DTensorModel:
    """`parallelize_module` with loss_parallel; between `pp` ranks Schedule1F1B, with one rank gradient accumulation."""

    def __init__(self, sizes: Sizes, *, pp: int = 1, sequence: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "tp"))
        rank, model = mesh.get_local_rank("pp"), sizes.model()
        ends = list(accumulate(sizes.cut(pp), initial=0))
        layers = dict(list(model.named_children())[ends[rank] : ends[rank + 1]])
        stage = nn.Sequential()
        for name, layer in layers.items():
            stage.add_module(name, layer)
        _cut(stage, sizes, mesh["tp"], sequence=sequence)
        self.parameters = dict(stage.named_parameters())
        self._loss, inputs_targets = sizes.loss, sizes.batch()
        self._pieces = sizes.num_microbatches
        self._schedule: Any = None
        self._stage = stage
        self._inputs, self._targets = inputs_targets
        self._is_first, self._is_last = rank == 0, rank == pp - 1
        if pp > 1:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            made = PipelineStage(stage, rank, pp, torch.device("cpu"), group=mesh.get_group("pp"))
            self._schedule = Schedule1F1B(made, n_microbatches=self._pieces, loss_fn=sizes.loss)

    def step(self) -> Tensor | None:
        with _loss_parallel():
            return self._accumulate() if self._schedule is None else self._run_schedule()

    def _accumulate(self) -> Tensor:
        total = torch.zeros(())
        for inputs, targets in zip(self._inputs.chunk(self._pieces), self._targets.chunk(self._pieces), strict=True):
            loss = self._loss(self._stage(inputs), targets) / self._pieces
            loss.backward()
            total += _full(loss.detach())
        return total

    def _run_schedule(self) -> Tensor | None:
        losses: list[Tensor] | None = [] if self._is_last else None
        inputs = (self._inputs,) if self._is_first else ()
        target = self._targets if self._is_last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return None if losses is None else torch.stack([_full(loss.detach()) for loss in losses]).mean()

    def gradients(self) -> Gradients:
        for name, parameter in self.parameters.items():
            yield name, None if parameter.grad is None else _full(parameter.grad), whole

    def waited(self) -> float:
        return float("nan")  # `collective_seconds` measures it apart

    def close(self) -> None:
        pass


def _cut(stage: nn.Sequential, sizes: Sizes, mesh: Any, *, sequence: bool) -> None:
    """The layers of a stage, as torchtitan's plan has them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    for block in sizes.block_names():
        plan |= {
            f"{block}.qkv": ColwiseParallel(input_layouts=between),
            f"{block}.project": RowwiseParallel(output_layouts=between),
            f"{block}.up": ColwiseParallel(input_layouts=between),
            f"{block}.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            plan |= {f"{block}.norm_1": SequenceParallel(), f"{block}.norm_2": SequenceParallel()}
    if sequence:
        plan[sizes.norm] = SequenceParallel()
    plan[sizes.head] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    held = {name for name, _ in stage.named_modules()}
    parallelize_module(stage, mesh, {name: how for name, how in plan.items() if name in held})


def _loss_parallel() -> AbstractContextManager[None]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()  # type: ignore[no-any-return]


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def collective_seconds(step: Any) -> float:
    """Time that one call of `step` spends inside collectives of torch, waiting included, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    kinds = ("_c10d_functional::", "_dtensor::")
    return sum(e.cpu_time_total for e in found.key_averages() if e.key.startswith(kinds)) / 1e6


def peak_bytes(system: Any) -> int:
    """Peak bytes that autograd keeps in a step, storages once, without parameters."""
    kept = SavedBytes(system.parameters.values())
    with kept.counting():
        system.step()
    return kept.peak
