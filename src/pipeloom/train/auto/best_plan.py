"""The best plan that a run can have on the processes of one machine. No torch here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipeloom import schedules
from pipeloom.common.quantities import percent_text, seconds_text
from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir.data_axis import DataStrategy
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration, even_blocks
from pipeloom.plan.costs.cost_model import CostModel, StepPrediction
from pipeloom.plan.plan import Plan
from pipeloom.train.auto.plan_times import PlanTimes
from pipeloom.train.config.schedule import AUTO
from pipeloom.train.config.train_config import TrainConfig

_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
_STRATEGIES = (DataStrategy.DDP, DataStrategy.ZERO1)
_MOST_CHUNKS = 4
Found = tuple[float, Configuration, StepPrediction]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The best plan.

    Attributes:
        plan: it.
        of: its configuration.
        times: predicted.
        words: one line about it.
    """

    plan: Plan
    of: Configuration
    times: PlanTimes
    words: str


def best_plan(
    asked: TrainConfig,
    costs: CostModel,
    processes: int,
    refusal: Callable[[Plan], str | None],
    fixed: Mapping[str, Any] | None = None,
) -> Chosen:
    """The fastest plan that fits into memory.

    Args:
        asked: the configuration, with the options that the plan must keep.
        costs: of the model on this machine.
        processes: of the run.
        refusal: why the run cannot have a plan; None: it can.
        fixed: more values that the plan must have, by the names of `_value`.

    Raises:
        InputError: there is none.
    """
    found, why = list[Found](), "no schedule supports the sizes"
    for of in _configurations(asked, costs, processes):
        if any(_value(of, name) != value for name, value in (fixed or {}).items()):
            continue
        try:
            step = costs.predict(of)
        except PipeloomError as error:
            why = str(error)
            continue
        found.append((step.step_seconds, of, step))
    fits = list[tuple[Found, Plan]]()
    for each in sorted(found, key=lambda each: each[0]):
        peaks = tuple(costs.peak_bytes(each[1]))
        if max(peaks) > _memory(asked, costs, processes):
            why = "memory.cap, or the memory of this machine, is too small"
            continue
        plan = _plan_of(each, costs, peaks, asked)
        if (refused := refusal(plan)) is not None:
            why = refused
            continue
        fits.append((each, plan))
        if len(fits) == 2:
            break
    if not fits:
        raise InputError(f"processes={processes}: no plan can run: {why}. Use other processes, or give degrees.")
    (_, of, step), plan = fits[0]
    words = (
        f"{words_of(of)}: {seconds_text(step.step_seconds)} per step predicted, bubble "
        f"{percent_text(step.timeline.bubble_fraction)}"
    )
    if len(fits) > 1:
        (seconds, other, _), _ = fits[1]
        slower = percent_text(seconds / step.step_seconds - 1)
        words += f"; next of {len(found):,}: {words_of(other)}, {slower} slower"
    times = PlanTimes.predicted(step.timeline, step.step_seconds)
    return Chosen(plan=replace(plan, why=(f"{words}.",)), of=of, times=times, words=words)


def predicted_times(costs: CostModel, of: Configuration) -> PlanTimes:
    """Of a configuration that runs."""
    step = costs.predict(of)
    return PlanTimes.predicted(step.timeline, step.step_seconds)


def words_of(of: Configuration) -> str:
    """``pipeline 2 x data 2 (zero1), 1f1b, 4 micro-batches of 2``."""
    degrees = {"pipeline": of.pipeline, "data": of.data, "tensor": of.inside.tensor}
    words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one process"
    strategy = f" ({of.strategy})" if of.data > 1 else ""
    schedule = f", {of.schedule}{f' with {of.chunks} chunks' if of.chunks > 1 else ''}" if of.pipeline > 1 else ""
    plural = "es" if of.microbatches > 1 else ""
    return f"{words}{strategy}{schedule}, {of.microbatches} micro-batch{plural} of {of.microbatch_size}"


def _configurations(asked: TrainConfig, costs: CostModel, processes: int) -> Iterator[Configuration]:
    """All degrees, micro-batches, schedules, virtual stages and data strategies; blocks are even."""
    batch, layers = asked.batch.size, costs.model.layers
    for data, tensor in product(_divisors(processes), repeat=2):
        pipeline, rest = divmod(processes, data * tensor)
        if rest or batch % data or pipeline > layers:
            continue
        try:
            InsideStage(tensor=tensor).check(costs.model.layer_sizes(1, 1))
        except InputError:
            continue
        for size in _divisors(batch // data):
            microbatches = batch // data // size
            if asked.batch.microbatches not in (None, microbatches):
                continue
            of = Configuration(
                pipeline=pipeline,
                data=data,
                microbatches=microbatches,
                microbatch_size=size,
                inside=InsideStage(tensor=tensor),
                precision=asked.number_format,
                recompute=Recompute(asked.memory.recompute),
                optimizer=asked.optimizer.name,
            )
            for strategy in _STRATEGIES if data > 1 else _STRATEGIES[:1]:
                yield from _scheduled(replace(of, strategy=strategy), asked, layers)


def _scheduled(of: Configuration, asked: TrainConfig, layers: int) -> Iterator[Configuration]:
    names = _SCHEDULES if asked.schedule == AUTO else (asked.schedule,)
    for name in names if of.pipeline > 1 else names[:1]:
        family = schedules.find(name)
        for chunks in range(1, _MOST_CHUNKS + 1) if family.chunks is None else (family.chunks,):
            stages = of.pipeline * chunks
            if stages <= layers:
                yield replace(of, schedule=name, chunks=chunks, blocks=tuple(even_blocks(layers, stages)))


def _value(of: Configuration, name: str) -> Any:
    return of.inside.tensor if name == "tensor" else getattr(of, name)


def _memory(asked: TrainConfig, costs: CostModel, processes: int) -> float:
    """Bytes of a process."""
    cap = float("inf") if asked.memory.cap is None else float(asked.memory.cap)
    machine = costs.cluster.device.memory_bytes
    return cap if machine is None else min(cap, machine / processes)


def _plan_of(found: Found, costs: CostModel, peaks: tuple[float, ...], asked: TrainConfig) -> Plan:
    seconds, of, _ = found
    return Plan(
        schedule=of.schedule,
        pipeline=of.pipeline,
        microbatches=of.microbatches,
        data=of.data,
        virtual_stages=of.chunks,
        batch_size=of.batch_size,
        cut=tuple(of.blocks_of(costs.model.layers)),
        recompute=(asked.memory.recompute,) * of.stages,
        data_strategy=str(of.strategy) if of.data > 1 else None,
        tensor=of.inside.tensor,
        tensor_layout="1d" if of.inside.tensor > 1 else None,
        precision=of.precision.dtype,
        gradients=of.precision.gradients,
        predicted_step_seconds=seconds,
        predicted_memory_bytes=peaks,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
