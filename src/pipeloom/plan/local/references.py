"""Reference steps: a measured step of every mesh shape, by which predictions are corrected. No torch here.

What processes lose to each other is in no table: shared caches and bandwidth, cores that they take turns on,
threads of collectives, waits for the slower one. So a step of all processes is measured for the shapes of their
mesh, with the smallest and the largest micro-batches, and compared with its prediction. Pipelines are measured with
1F1B, whose ranks wait for each other in every micro-batch, with GPipe, whose ranks wait least, with ZB-H1, which
splits backwards, with ZB-V, which does so in twice as many stages, and with Chimera, whose ranks hold stages twice and
are always busy; with one micro-batch, GPipe is 1F1B. Configurations of the same shape and with a schedule like it are
corrected by this ratio, interpolated between the two sizes by powers. With n processes, a shape of degrees d that is
not measured is corrected by

    product over axes of (ratio of the shape with degree n along the axis) ^ (log d / log n)

Repeated steps differ, and plans must not be ranked by this noise. So ratios count as far as they differ by more than
repeated steps do; else all shapes have the same ratio, and plans are ranked as predicted. This is the random-effects
model of DerSimonian and Laird (Controlled Clinical Trials, 1986) for the logarithms of the ratios:

    noise v of a ratio: variance of the logarithms of repeated steps / their number; t: variance of the true ratios
    ratio = mean + t / (t + v) * (measured ratio - mean)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, pow
from statistics import fmean, quantiles, variance
from typing import Any, NamedTuple, Self

from pipeloom.errors import PipeloomError
from pipeloom.ir import Op, Schedule
from pipeloom.ir.data_axis import DataStrategy
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration, even_blocks
from pipeloom.schedules import SYNCHRONOUS

MOST_SAMPLES = 16  # of a measured micro-batch; larger ones take in proportion
_MOST_MICROBATCHES = 8  # per rank of a pipeline
_LEAST_VARIANCE = 1e-12  # of logarithms of steps
USUAL = "1f1b"  # corrects the others where they are not measured
_FORWARDS_FIRST, _SPLIT, _V, _BOTH_WAYS = "gpipe", "zb-h1", "zb-v", "chimera"
_MEASURED = USUAL, _FORWARDS_FIRST, _SPLIT, _V, _BOTH_WAYS
_INSTEAD = {_V: _SPLIT}  # where the first is not measured; else the usual one


def lower_quartile(times: Sequence[float]) -> float:
    """Of repeated measurements: other load only ever makes one longer."""
    return quantiles(times)[0] if len(times) > 1 else times[0]


@lru_cache
def _built(name: str, ranks: int, microbatches: int) -> Schedule | None:
    """A schedule that needs no measured times; None where it does not support the sizes."""
    try:
        return SYNCHRONOUS[name](num_ranks=ranks, num_microbatches=microbatches)
    except PipeloomError:
        return None


@lru_cache
def _like(name: str) -> str:
    """The measured schedule that is most like one."""
    family = SYNCHRONOUS.get(name)
    if family is not None and family.to_measure:
        return _SPLIT
    schedule = None if family is None else _built(name, 2, 4)
    if schedule is None:
        return USUAL
    if schedule.placement.is_replicated:
        return _BOTH_WAYS
    if schedule.split_backwards:
        return _V if schedule.placement.num_chunks > 1 else _SPLIT
    forwards = [action.op is Op.F for action in schedule.orders[0]]
    return _FORWARDS_FIRST if forwards == sorted(forwards, reverse=True) else USUAL


class Shape(NamedTuple):
    """Degrees of a mesh; whether replicas shard the optimizer's states, whose collectives are others; a schedule."""

    pipeline: int
    data: int
    tensor: int
    sharded: bool
    schedule: str = USUAL

    @classmethod
    def of(cls, configuration: Configuration) -> Self:
        """That of a configuration."""
        sharded = configuration.data > 1 and configuration.strategy.shards_optimizer
        schedule = _like(configuration.schedule) if configuration.pipeline > 1 else USUAL
        if schedule == _FORWARDS_FIRST and configuration.microbatches == 1:
            schedule = USUAL
        return cls(configuration.pipeline, configuration.data, configuration.inside.tensor, sharded, schedule)

    @property
    def with_schedules(self) -> "Iterator[Shape]":
        """The shape with each schedule that is measured."""
        for schedule in _MEASURED if self.pipeline > 1 else (USUAL,):
            yield self._replace(schedule=schedule)

    @property
    def along_axes(self) -> "list[tuple[Shape, float]]":
        """For every degree above 1, the shape with all processes along its axis, and log d / log n."""
        count = self.pipeline * self.data * self.tensor
        shapes = Shape(count, 1, 1, False, self.schedule), Shape(1, count, 1, self.sharded), Shape(1, 1, count, False)
        return [(shape, log(degree) / log(count)) for shape, degree in zip(shapes, self[:3], strict=True) if degree > 1]

    @property
    def num_stages(self) -> int:
        """Stages of its reference steps."""
        return 2 * self.pipeline if self.schedule == _V else self.pipeline

    def steps(self, batch: int, layers: int, precision: Precision) -> list[Configuration]:
        """Reference steps with the smallest and with the largest micro-batches of a global batch; few of many."""
        own = batch // self.data
        most = self._microbatches(range(max(1, self.pipeline // 2), own + 1))  # micro-batches, of the largest
        least = self._microbatches(range(min(own, _MOST_MICROBATCHES * self.pipeline), 0, -1))
        if most is None or least is None or self.num_stages > layers:
            return []
        return [
            Configuration(
                schedule=self.schedule,
                pipeline=self.pipeline,
                chunks=2 if self.schedule in (_V, _BOTH_WAYS) else 1,
                microbatches=microbatches,
                microbatch_size=samples,
                data=self.data,
                strategy=DataStrategy.ZERO1 if self.sharded else DataStrategy.DDP,
                inside=InsideStage(tensor=self.tensor),
                precision=precision,
                blocks=tuple(even_blocks(layers, self.num_stages)),
            )
            for samples, microbatches in {1: least, min(own // most, MOST_SAMPLES): most}.items()
        ]

    def _microbatches(self, numbers: Iterable[int]) -> int | None:
        """The first of some numbers of micro-batches that the schedule supports."""
        return next((each for each in numbers if _built(self.schedule, self.pipeline, each) is not None), None)


def reference_shapes(config: GPTConfig, processes: int) -> list[Shape]:
    """The shapes of which so many processes can train a model: with 1F1B first, and of these, those along one axis."""
    found = list[Shape]()
    for pipeline in range(1, min(processes, config.layers) + 1):
        for tensor in range(1, processes // pipeline + 1):
            if processes % (pipeline * tensor) or config.heads % tensor or (config.experts and tensor > 1):
                continue
            data = processes // pipeline // tensor
            for sharded in (False, True)[: 2 if data > 1 else 1]:
                shapes = Shape(pipeline, data, tensor, sharded).with_schedules
                found += [shape for shape in shapes if shape.num_stages <= config.layers]
    return sorted(found, key=lambda shape: (shape.schedule != USUAL, len(shape.along_axes))) if processes > 1 else []


@dataclass(frozen=True, kw_only=True)
class References:
    """Measured reference steps.

    Attributes:
        processes: that run them.
        batch: samples per step of all replicas.
        seconds: of each step, by shape and samples per micro-batch.
    """

    processes: int = 1
    batch: int = 1
    seconds: Mapping[Shape, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """As a JSON object; `from_mapping` reads it back."""
        rows = [[*shape, {str(size): value for size, value in row.items()}] for shape, row in self.seconds.items()]
        return {"processes": self.processes, "batch": self.batch, "seconds": rows}

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`."""
        rows = {
            Shape(*shape): {int(size): tuple(each) for size, each in row.items()} for *shape, row in data["seconds"]
        }
        return cls(**{**data, "seconds": rows})

    @classmethod
    def joined(cls, found: Sequence[Self]) -> Self:
        """The steps of repeated measurements, each of some shapes or all."""
        rows: dict[Shape, dict[int, tuple[float, ...]]] = {}
        for each in found:
            for shape, row in each.seconds.items():
                known = rows.setdefault(shape, {})
                known |= {samples: known.get(samples, ()) + times for samples, times in row.items()}
        return cls(processes=found[0].processes, batch=found[0].batch, seconds=rows)


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Measured over predicted seconds of reference steps.

    Attributes:
        processes: for which they hold.
        ratios: by shape and samples per micro-batch.
    """

    processes: int = 1
    ratios: Mapping[Shape, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, found: References, predict: Callable[[Configuration], float], layers: int, precision: Precision
    ) -> Self:
        """The corrections of predictions by reference steps.

        Args:
            found: the steps.
            predict: the seconds that are predicted for a step.
            layers: of the model.
            precision: number formats of the steps.
        """
        steps = [
            (shape, of)
            for shape, row in found.seconds.items()
            for of in shape.steps(found.batch, layers, precision)
            if of.microbatch_size in row
        ]
        measured: dict[tuple[Shape, int], list[float]] = {}  # steps of the same order together
        for shape, of in steps:
            same = measured.setdefault((Shape.of(of), of.microbatch_size), [])
            predicted = predict(of)
            same += [log(seconds / predicted) for seconds in found.seconds[shape][of.microbatch_size]]
        logarithms = dict(zip(measured, _shrunk([*measured.values()]), strict=True))
        ratios: dict[Shape, dict[int, float]] = {}
        for shape, of in steps:
            ratios.setdefault(shape, {})[of.microbatch_size] = exp(logarithms[Shape.of(of), of.microbatch_size])
        return cls(processes=found.processes, ratios=ratios)

    def factor(self, of: Configuration) -> float:
        """How many times as long a configuration takes; 1 for another number of processes."""
        if of.devices != self.processes or of.devices == 1:
            return 1.0
        shape = Shape.of(of)
        if (row := self._row(shape)) is not None:
            return _between(row, of.microbatch_size)
        product = 1.0
        for along, exponent in shape.along_axes:
            if (row := self._row(along)) is not None:
                product *= pow(_between(row, of.microbatch_size), exponent)
        return product

    def _row(self, shape: Shape) -> Mapping[int, float] | None:
        names = shape.schedule, _INSTEAD.get(shape.schedule, USUAL), USUAL
        rows = (self.ratios.get(shape._replace(schedule=name)) for name in names)
        return next((row for row in rows if row is not None), None)

    @property
    def least(self) -> float:
        """The least factor that any configuration may have."""
        return min([1.0, *(ratio for row in self.ratios.values() for ratio in row.values())])


def _between(row: Mapping[int, float], samples: int) -> float:
    """The ratio for a micro-batch size, by powers between the measured sizes."""
    least, most = min(row), max(row)
    if least == most:
        return row[least]
    part = min(1.0, max(0.0, log(samples / least) / log(most / least)))
    return exp((1 - part) * log(row[least]) + part * log(row[most]))


def _shrunk(rows: Sequence[Sequence[float]]) -> list[float]:
    """What each row of repeated measurements says, as far as rows differ by more than measurements of one row do."""
    values = [lower_quartile(row) for row in rows]
    spreads = [variance(row) for row in rows if len(row) > 1]
    if not spreads or len(rows) < 2:
        return values
    noise = [max(fmean(spreads), _LEAST_VARIANCE) / len(row) for row in rows]
    weights = [1 / each for each in noise]
    total, mean = sum(weights), fmean(values, weights)
    beyond = sum(w * (value - mean) ** 2 for w, value in zip(weights, values, strict=True)) - (len(rows) - 1)
    true = max(0.0, beyond / (total - sum(w * w for w in weights) / total))
    mean = fmean(values, [1 / (true + each) for each in noise])
    return [mean + true / (true + each) * (value - mean) for value, each in zip(values, noise, strict=True)]
