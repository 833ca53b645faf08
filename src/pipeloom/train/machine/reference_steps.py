"""Measures reference steps (`pipeloom.plan.local.references`) with all processes of a run."""

import gc
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from pipeloom import schedules
from pipeloom.models import GPT, GPTConfig, loss_fn, materialize
from pipeloom.parallel import DataParallel, Mesh, Precision
from pipeloom.parallel.tensor.parallelize import parallelize
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.local.references import USUAL, References, Shape, reference_shapes
from pipeloom.split import split
from pipeloom.training import BarrierStep, Pipeline

_WARM_UP, _STEPS = 2, 3


class ConfiguredRun:
    """A GPT that is trained in one configuration, with AdamW and clipping, on random tokens; all processes make it.

    Args:
        config: sizes of the model.
        of: the configuration, of degrees along pp, dp and tp.
        mesh: of these degrees.
    """

    def __init__(self, config: GPTConfig, of: Configuration, mesh: Mesh) -> None:
        schedule = schedules.build(
            of.schedule,
            num_ranks=of.pipeline,
            num_microbatches=of.microbatches,
            num_chunks=None if of.chunks == 1 or schedules.find(of.schedule).chunks else of.chunks,
        )
        with torch.device("meta"):
            model = GPT(config)
        if of.inside.tensor > 1:
            parallelize(model, mesh)
        stages = split(model, schedule.num_stages, cut=list(of.blocks or ()))
        for stage in schedule.placement.stages_of[mesh.coordinate("pp")]:
            materialize(stages.modules[stage], 0)
        self.pipeline = Pipeline(
            stages,
            schedule,
            loss_fn=loss_fn,
            mesh=mesh,
            data=DataParallel(of.strategy.value) if of.data > 1 else None,
            precision=of.precision if of.precision.has_masters else None,
        )
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-4, fused=True)
        self._stepper = BarrierStep(self.pipeline, self.optimizer, max_norm=1.0)
        draws = torch.Generator().manual_seed(mesh.coordinate("dp"))
        shape = 2, of.microbatches * of.microbatch_size, config.sequence_length
        self._inputs, self._targets = torch.randint(config.vocabulary_size, shape, generator=draws).unbind(0)

    def step(self) -> None:
        """Train on one batch."""
        self._stepper.step(self._inputs, self._targets)


def measure_references(
    config: GPTConfig,
    batch: int,
    *,
    precision: Precision,
    fits: Callable[[Configuration], bool] = lambda _: True,
    shapes: Sequence[Shape] | None = None,
    seconds: float = 60.0,
    passes: int = 2,
) -> References:
    """Measure steps of every shape of the mesh; every process calls it.

    Args:
        config: sizes of the model.
        batch: samples per step, of all replicas.
        precision: number formats.
        fits: whether a step fits into memory, the same on every process; others are left out.
        shapes: of the mesh; None: all that can run.
        seconds: after this many, only shapes along one axis are measured, with 1F1B and the smallest micro-batches;
            after half of them no other pass begins.
        passes: over all shapes. A machine is faster and slower in phases, which last longer than the steps of a shape.

    Returns:
        Of each step the seconds of the slowest process, the same on every process.
    """
    processes, spent = dist.get_world_size(), 0.0
    found: list[References] = []
    shapes = reference_shapes(config, processes) if shapes is None else shapes
    while len(found) < passes and (not found or 2 * spent < seconds):  # the same on every process
        rows: dict[Shape, dict[int, tuple[float, ...]]] = {}
        for shape in shapes:
            few = spent > seconds
            if few and (len(shape.along_axes) > 1 or shape.schedule != USUAL):
                continue
            steps = [of for of in shape.steps(batch, config.layers, precision)[: 1 if few else None] if fits(of)]
            if not steps:
                continue
            mesh, rows[shape] = Mesh(pp=shape.pipeline, dp=shape.data, tp=shape.tensor), {}
            for of in steps:
                with torch.random.fork_rng(devices=[]):  # ranks along tp draw the same numbers
                    torch.manual_seed(0)
                    times = _seconds(ConfiguredRun(config, of, mesh))
                rows[shape][of.microbatch_size] = tuple(times[_WARM_UP:])
                spent += sum(times)
            mesh.close()
            gc.collect()
        found.append(References(processes=processes, batch=batch, seconds=rows))
    return References.joined(found)


def _seconds(run: ConfiguredRun) -> list[float]:
    """Of all steps, on the slowest process."""
    times = torch.empty(_WARM_UP + _STEPS, dtype=torch.float64)
    for number in range(len(times)):
        dist.barrier()
        start = perf_counter()
        run.step()
        times[number] = perf_counter() - start
    run.pipeline.close()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found
