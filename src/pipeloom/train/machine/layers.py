"""Measures the layers of pipeloom's GPT as the runtime runs them: in a pipeline of four stages in this process.

Of repeated steps the least times count: other load only ever makes one longer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeloom import schedules
from pipeloom.ir import Op
from pipeloom.ir.text import parse_action
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel import Precision
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes, Three
from pipeloom.plan.local.measured import Rates
from pipeloom.processes.black_box import ActionObserver
from pipeloom.split.profile import steady_timer
from pipeloom.training import BarrierStep, Pipeline

_STAGES = 4  # a block and the embedding, a block, several blocks, a block and the head
_MOST_BLOCKS = 5  # of the stage with several; as many as the model has fill caches as the model does
_MICROBATCHES = 4


def measure_layers(
    config: GPTConfig,
    samples: Sequence[int],
    *,
    precision: Precision,
    rates: Rates,
    rounds: int = 3,
    seconds: float = 30.0,
) -> LayerTimes:
    """Measure each of the micro-batch sizes `samples`, ascending.

    Args:
        config: sizes of the model.
        samples: per micro-batch.
        precision: number formats.
        rates: of this machine, to which updates are compared.
        rounds: measured steps after one for warm-up.
        seconds: no size begins that would end later, taken that it needs twice the time of the one before.
    """
    rows: dict[int, LayerSeconds] = {}
    firsts: dict[int, LayerSeconds] = {}
    updates, others = list[float](), list[float]()
    begun = started = perf_counter()
    with torch.random.fork_rng(devices=[]):
        for size in samples:
            firsts[size], rows[size], update, other = _measured(config, size, precision, rates, rounds)
            updates.append(update)
            others.append(other)
            now = perf_counter()
            if now + 2 * (now - started) > begun + seconds:
                break
            started = now
    element = 2 if precision.has_masters else 4
    return LayerTimes(element=element, rows=rows, firsts=firsts, update=median(updates), step_seconds=median(others))


def _measured(
    config: GPTConfig, samples: int, precision: Precision, rates: Rates, rounds: int
) -> tuple[LayerSeconds, LayerSeconds, float, float]:
    """Of the first micro-batch of a step, and of later ones; updates over the table's; the step beside all that."""
    several = min(max(2, config.layers - (_STAGES - 1)), _MOST_BLOCKS)
    same = replace(config, layers=_STAGES - 1 + several, tie_embeddings=False, experts_every=1)
    kinds = [same]
    if config.experts and config.experts_every > 1:
        kinds.append(_dense(same))
    found: list[LayerSeconds | None] = [None, None]
    update, other = 1.0, 0.0
    for kind in kinds:
        run = _Run(kind, samples, several, precision)
        both, update, other = run.whole(rounds, rates)
        halves = run.split(rounds)
        for number, whole in enumerate(both):
            before = found[number]
            row = _of_stages(whole, halves, several, experts=kind.experts > 0)
            found[number] = row if before is None else before._replace(blocks={**before.blocks, **row.blocks})
    first, later = found
    assert first is not None
    assert later is not None
    return first._replace(split=later.split, head_split=later.head_split), later, update, other


def _of_stages(
    whole: Sequence[tuple[float, float]], halves: Sequence[tuple[float, float]] | None, several: int, *, experts: bool
) -> LayerSeconds:
    """Layers from F and B of the four stages, and from I and W of the same stages."""
    block, stage = _parted(whole[1], whole[2], several)
    first, last = (tuple(max(0.0, a - b) for a, b in zip(whole[at], whole[1], strict=True)) for at in (0, 3))
    of_block, of_head, split, head_split = (1.0, 1.0), (1.0, 1.0), 1.0, 1.0
    if halves is not None:
        of_block, split = halves[2], sum(halves[2]) / max(whole[2][1], 1e-12)
        inputs, weights = (max(0.0, a - b) for a, b in zip(halves[3], halves[1], strict=True))
        if inputs + weights > 0 and last[1] > 0:
            of_head, head_split = (inputs, weights), (inputs + weights) / last[1]
    return LayerSeconds(
        (first[0], 0.0, first[1]),  # an embedding has no gradient of its input
        _shared_out(last, *of_head),
        {experts: _shared_out(block, *of_block)},
        (stage[0], stage[1], 0.0),
        split,
        head_split,
    )


def _parted(single: Sequence[float], several: Sequence[float], count: int) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds of a block, and of a stage beside its blocks, from stages with 1 and with `count` blocks."""
    blocks = [
        (many - one) / (count - 1) if many > one else many / count for one, many in zip(single, several, strict=True)
    ]
    return blocks, [max(0.0, one - block) for one, block in zip(single, blocks, strict=True)]


def _dense(config: GPTConfig) -> GPTConfig:
    """The same sizes without experts."""
    plain: dict[str, Any] = dict.fromkeys(("top_k", "capacity_factor", "expert_width", "balance_weight"))
    return replace(config, experts=0, experts_every=1, shared_experts=0, z_loss_weight=0.0, router="topk", **plain)


def _shared_out(times: Sequence[float], inputs: float, weights: float) -> Three:
    """Seconds of F, and of a whole backward in the proportion of `inputs` and `weights`."""
    forward, backward = times
    part = inputs / max(inputs + weights, 1e-12)
    return forward, part * backward, (1 - part) * backward


class _ActionTimes(ActionObserver):
    """Seconds of every action of a step, from its start to that of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._now = steady_timer()
        self._marks: list[tuple[str, float]] = []

    def begins(self, action: str) -> None:
        self._marks.append((action, self._now()))

    def take(self) -> dict[tuple[int, Op], list[float]]:
        """Seconds by stage and op, in the order of micro-batches, since the last call.

        The end of the last action is unknown: it counts as long as the median of its kind.
        """
        found: dict[tuple[int, Op], list[float]] = defaultdict(list)
        for (label, start), (_, end) in pairwise(self._marks):
            action = parse_action(label)
            found[action.stage, action.op].append(end - start)
        label, start = self._marks[-1]
        action = parse_action(label)
        own = found[action.stage, action.op]
        own.append(median(own) if own else self._now() - start)
        self.first, self.end = self._marks[0][1], start + own[-1]
        self._marks.clear()
        return found


class _Run:
    """The pipelines of one model and micro-batch size."""

    def __init__(self, config: GPTConfig, samples: int, several: int, precision: Precision) -> None:
        self._config, self._several, self._precision = config, several, precision
        shape = 2, samples * _MICROBATCHES, config.sequence_length
        self._inputs, self._targets = torch.randint(config.vocabulary_size, shape).unbind(0)

    def _pipeline(self, schedule: str) -> tuple[Pipeline, _ActionTimes]:
        model, times = GPT(self._config), _ActionTimes()
        init_parameters(model, seed=0)
        pipeline = Pipeline(
            model,
            schedules.build(schedule, num_ranks=_STAGES, num_microbatches=_MICROBATCHES),
            loss_fn=loss_fn,
            cut=[1, 1, self._several, 1],
            transport="loopback",
            precision=self._precision if self._precision.has_masters else None,
            blackbox=times,
        )
        return pipeline, times

    def whole(self, rounds: int, rates: Rates) -> tuple[tuple[list[tuple[float, float]], ...], float, float]:
        """Seconds of F and B by stage, of the first micro-batch and of later ones; and what else a step takes.

        That is, of its start, end, norm, clipping and update, the part beyond the constant seconds of a step over the
        table's seconds of an update, and these constant seconds; without a table 1, and start, end and norm.
        """
        pipeline, times = self._pipeline("1f1b")
        stepper = BarrierStep(pipeline, torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True), max_norm=1.0)
        parameters = sum(parameter.numel() for parameter in pipeline.parameters())
        table = rates.curve("update", parameters)
        rows, around, ends, now = (
            list[dict[tuple[int, Op], list[float]]](),
            list[float](),
            list[float](),
            steady_timer(),
        )
        for _ in range(1 + rounds):
            rows.append({})
            norms = list[float]()

            def computed(row: dict[tuple[int, Op], list[float]] = rows[-1], norms: list[float] = norms) -> Tensor:
                norms.append(now())
                row |= times.take()
                return torch.empty(0)

            begun = now()
            stepper.step(self._inputs, self._targets, computed)
            around.append(times.first - begun + now() - times.end)
            ends.append(times.first - begun + norms[-1] - times.end)
        pipeline.close()

        def of(stage: int, op: Op) -> tuple[float, float]:
            each = [min(column) for column in zip(*(row[stage, op] for row in rows[1:]), strict=True)]
            return each[0], fmean(each[1:])

        both = [list(zip(of(stage, Op.F), of(stage, Op.B), strict=True)) for stage in range(_STAGES)]
        first, later = ([pair[number] for pair in both] for number in (0, 1))
        if not table:
            return (first, later), 1.0, min(ends[1:])
        constant = rates.second("step")
        return (first, later), max(0.0, min(around[1:]) - constant) / table, constant

    def split(self, rounds: int) -> list[tuple[float, float]] | None:
        """Seconds of I and of W by stage; None: too short to be measured."""
        pipeline, times = self._pipeline("zb-h1")
        rows = []
        for _ in range(1 + rounds):
            pipeline.step(self._inputs, self._targets)
            rows.append({key: fmean(each) for key, each in times.take().items()})
            for parameter in pipeline.parameters():
                parameter.grad = None
        pipeline.close()

        def least(stage: int, op: Op) -> float:
            return min(row.get((stage, op), 0.0) for row in rows[1:])

        found = [(least(stage, Op.I), least(stage, Op.W)) for stage in range(_STAGES)]
        return found if min(map(min, found[1:])) > 0 else None
