"""torch.distributed.pipelining and DeepSpeed, used as their documentation says, on the same modules."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.links import EmulatedLinks
from benchmarks.common.workloads import Workload
from pipeloom import schedules

# Schedules that pipeloom and torch both have, by their names here.
TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class TorchPipelining:
    """`PipelineStage`s of a rank with one of `TORCH_SCHEDULES`, on the stages that pipeloom's has there.

    Args:
        group: the processes of the pipeline; all if not given.
        wrap: what is to be done to the module of a stage before it becomes a `PipelineStage`, such as DDP.
    """

    def __init__(
        self,
        workload: Workload,
        schedule: str,
        links: EmulatedLinks | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        wrap: Callable[[nn.Sequential], nn.Module] | None = None,
    ) -> None:
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        M = workload.num_microbatches
        placement = schedules.build(schedule, num_ranks=num_ranks, num_microbatches=M).placement
        model = workload.model()
        ends = list(accumulate(workload.cut(placement.num_stages), initial=0))
        modules = {s: model[ends[s] : ends[s + 1]] for s in placement.stages_of[rank]}
        stages = [
            pipelining.PipelineStage(
                wrap(module) if wrap else module, s, placement.num_stages, torch.device("cpu"), group=group
            )
            for s, module in modules.items()
        ]
        make = getattr(pipelining, TORCH_SCHEDULES[schedule])
        several = issubclass(make, PipelineScheduleMulti)
        self._schedule = make(stages if several else stages[0], n_microbatches=M, loss_fn=workload.loss)
        inputs, targets = workload.batch()
        self._inputs = (inputs,) if 0 in modules else ()
        self._target = targets if placement.num_stages - 1 in modules else None
        self._links = links
        self.parameters = parameters_of(model, (p for module in modules.values() for p in module.parameters()))

    def step(self) -> Tensor | None:
        losses: list[Tensor] | None = None if self._target is None else []
        with self._links.delaying_torch() if self._links else nullcontext():
            self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        return None if losses is None else torch.stack(losses).mean()

    def close(self) -> None:
        pass


class DeepSpeedPipeline:
    """`PipelineModule` under `PipelineEngine.train_batch`, float32, no clipping.

    Without an optimizer, the engine's OptimizerStep instruction is replaced by counting the step, so that what is timed
    is what is timed elsewhere: forwards, backwards and messages; gradients are zeroed between steps by the benchmark.

    Args:
        num_stages: as many ranks has the pipeline; the other processes are copies of it.
        optimizer: makes the optimizer of given parameters.
        zero_stage: 0 or 1; more is refused with a pipeline.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        num_stages: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        zero_stage: int = 0,
    ) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # asked for, not used: the process group exists
        os.environ.setdefault("MASTER_PORT", "0")
        import deepspeed
        from deepspeed.runtime.pipe import schedule as instructions

        deepspeed.init_distributed(dist_backend="gloo")
        num_ranks = num_stages or dist.get_world_size()
        model = workload.model()
        # Blocks are of one type and first and last layers of others, so this cuts as `Workload.cut` does.
        module = deepspeed.PipelineModule(
            layers=list(model), num_stages=num_ranks, loss_fn=workload.loss, partition_method="uniform"
        )
        expected = list(accumulate(workload.cut(num_ranks), initial=0))
        assert list(module.parts) == expected, f"DeepSpeed cuts at {module.parts}, the others at {expected}"
        inputs, targets = workload.batch()
        M = workload.num_microbatches
        trained = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer(trained) if optimizer else torch.optim.SGD(trained, lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": len(inputs) // M,
                "gradient_accumulation_steps": M,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                "wall_clock_breakdown": False,
                "zero_optimization": {
                    "stage": zero_stage,
                    # One bucket holds all of a rank, so that gradients are reduced at once; the default is 2 GB.
                    "reduce_bucket_size": sum(p.numel() for p in trained) + 1,
                },
            },
        )

        def count_step(engine: Any, lr_kwargs: Any = None) -> None:
            engine.global_steps += 1

        if optimizer is None:
            engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, instructions.OptimizerStep: count_step}
        engine.global_steps = 1
        self._engine = engine
        self._microbatches = list(zip(inputs.chunk(M), targets.chunk(M), strict=True))
        self.parameters = parameters_of(model, module.parameters())

    def step(self) -> Tensor | None:
        return self._engine.train_batch(iter(self._microbatches))  # type: ignore[no-any-return]

    def close(self) -> None:
        pass


def prepare_deepspeed(stale_seconds: float = 300.0) -> None:
    """Have its extensions build: before any of its processes starts.

    They are built by ninja, which lies beside the interpreter and is not on everybody's PATH. A build that was killed
    leaves a file `lock` for which all later ones wait without end.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        if time.time() - lock.stat().st_mtime > stale_seconds:
            lock.unlink(missing_ok=True)


def parameters_of(model: nn.Module, held: Any) -> dict[str, nn.Parameter]:
    """The parameters of `model` that are among `held`, under their names in the whole model."""
    identities = {id(parameter) for parameter in held}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in identities}
