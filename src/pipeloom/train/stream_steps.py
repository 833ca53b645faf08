"""The steps of a run whose schedule updates while it runs: one stream from drain to drain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from pipeloom.ir import Op, Schedule
from pipeloom.passes import lower, stretch
from pipeloom.runtime import Pipeline, Stream
from pipeloom.runtime.stream_updates import Discount
from pipeloom.sim import Timeline, measured_timeline
from pipeloom.train.config import TrainConfig
from pipeloom.train.group import Group
from pipeloom.train.metrics import Predictor, Records, cost_numbers, read_cost
from pipeloom.train.optimizer import learning_rate
from pipeloom.train.streams import staleness

Live = Callable[[int, float, float], None]  # step, loss, tokens a second
Batches = Iterator[tuple[Tensor | None, Tensor | None]]


class StreamSteps:
    """Runs streams, and knows what became of their steps.

    A step is one batch. Its loss is known while the stream runs; the norm of its gradient, the bubble and the memory
    at the drain.

    Attributes:
        done: how many steps have been made, over all runs.
        records: of the last run, of all ranks.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, config: TrainConfig, group: Group) -> None:
        kind, num_updates = staleness(config)
        self._pipeline, self._config, self._group = pipeline, config, group
        self._tokens = config.batch.size * config.model.sequence_length
        self._live: Live | None = None
        self._first = self._last = 0
        self._start = 0.0
        self.records: Records = []
        self._stream = Stream(
            pipeline,
            optimizer,
            max_norm=config.optimizer.clip_norm or math.inf,
            learning_rate=self._rate,
            discount=cast(Discount, kind),
            discount_updates=num_updates,
            scale_by_replicas=config.optimizer.replica_scaling,
            on_update=self._came,
        )
        self._schedule = pipeline.schedule  # of the last run
        self._predictor = Predictor(lower(pipeline.schedule))

    @property
    def done(self) -> int:
        return self._stream.num_batches

    @done.setter
    def done(self, steps: int) -> None:
        self._stream.num_batches = steps

    def run(
        self, batches: Batches, count: int, live: Live, gather: Callable[[Records], Records]
    ) -> list[dict[str, Any]]:
        """Stream over `count` batches and drain; returns the metrics of each, all on process 0.

        Args:
            batches: inputs and targets, where this process reads them.
            count: how many.
            live: told of each loss as it comes, on process 0; not of the last.
            gather: makes of the records of this process those of all ranks, on every process.
        """
        first = self.done + 1
        self._live, self._first, self._last, self._start = live, first, first + count - 1, time.perf_counter()
        updates = self._stream.run(batches, count)
        self._schedule = stretch(
            self._pipeline.schedule, count * (self._pipeline.schedule.microbatches_per_update or 1)
        )
        numbers = cost_numbers(self._pipeline, self._pipeline.records, self._group.rank, self._group.size)
        held = torch.zeros(self._pipeline.num_ranks, dtype=torch.float64)
        for rank, versions in self._stream.peak_weight_versions.items():
            held[rank] = versions
        summed = self._group.sum(torch.cat([held, numbers]))
        cost = read_cost(summed[len(held) :], self._schedule, self._group.size)
        self._predictor.observe(cost)
        self.records = gather(self._pipeline.records)
        common = {
            "bubble_fraction": cost.bubble_fraction,
            "predicted_bubble_fraction": self.predicted().bubble_fraction if self._group.rank == 0 else math.nan,
            "peak_memory_bytes": cost.peak_memory_bytes,
            "live_activations": cost.live_activations,
            "weight_versions": [int(value) for value in summed[: len(held)].tolist()],
        }
        all_seconds = _seconds(self.records, self._schedule, count)
        return [
            {
                "step": step,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "lr": self._rate(step - 1),
                "tokens_per_second": self._tokens / seconds,
                "step_seconds": seconds,
                **common,
            }
            for step, (update, seconds) in enumerate(zip(updates, all_seconds, strict=True), first)
        ]

    def predicted(self) -> Timeline:
        """The last run as it should have gone."""
        self._predictor.observe_messages(self.records)
        return self._predictor.of(lower(self._schedule)).predict()

    def measured(self) -> Timeline:
        """The last run as it went."""
        return measured_timeline(self._schedule, [rows for _, rows in self.records])

    def _rate(self, batch: int) -> float:
        return learning_rate(batch, self._config.steps, self._config.optimizer)

    def _came(self, batch: int, loss: float) -> None:
        if self._live is not None and batch + 1 < self._last:  # that one comes with all its numbers
            seconds = max(time.perf_counter() - self._start, 1e-9)
            self._live(batch + 1, loss, self._tokens * (batch + 2 - self._first) / seconds)


def _seconds(records: Records, schedule: Schedule, count: int) -> list[float]:
    """For each batch, the seconds from the one before it through the last stage; the last one's drain with it."""
    size, last = schedule.num_microbatches // count, schedule.num_stages - 1
    begun = min(start for _, rows in records for _, start, _ in rows)
    ended = max(end for _, rows in records for _, _, end in rows)
    through = [begun] * count
    for _, rows in records:
        for action, _, end in rows:
            if action.stage == last and action.op is Op.B and action.microbatch is not None:
                batch = action.microbatch // size
                through[batch] = max(through[batch], end)
    moments = [begun, *accumulate(through, max)]
    moments[-1] = ended
    return [max(later - earlier, 1e-9) for earlier, later in pairwise(moments)]
