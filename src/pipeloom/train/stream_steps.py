"""The steps of an asynchronous schedule: one stream from drain to drain."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import torch

from pipeloom.ir import COMPUTE_OPS, Action, Op, Schedule
from pipeloom.passes import lower, stretch
from pipeloom.sim import Collective, Timeline, measured_timeline
from pipeloom.train.config.rules.streams import staleness
from pipeloom.train.optimizers import learning_rate, learning_rates
from pipeloom.train.output.expert_metrics import declared_metrics
from pipeloom.train.output.step_metrics import (
    Records,
    cost_metrics,
    cost_numbers,
    gathered_collectives,
    gathered_records,
    read_cost,
)
from pipeloom.train.run_parts import Batches, Live, RunParts, TokenBatch
from pipeloom.training import Stream
from pipeloom.training.stream.update_options import Discount
from pipeloom.transport.values import Value

_MOST_SHOWN = 256  # micro-batches of a run in its report


class StreamSteps:
    """Runs streams and collects the metrics of their steps.

    A step is one batch. Its loss is known while the stream runs. Gradient norms, bubble and memory are known at the
    drain.

    Attributes:
        done: number of completed steps, over all runs.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts, config = parts, parts.config
        self.done = 0
        kind, num_updates = staleness(config)
        self._tokens = config.batch.size * config.model.sequence_length
        self._live: Live | None = None
        self._first = self._last = 0
        self._begun = 0.0
        # Step, loss and learning rate of the steps of a run that has not ended, on process 0.
        self._known: list[dict[str, Any]] = []
        self._records: Records = []  # of the last run, of all ranks
        self._collectives: list[list[Collective]] = []  # inside their actions
        schedule = parts.pipeline.schedule
        period = schedule.update_period // (schedule.microbatches_per_update or 1)
        self.stop = parts.group.stream_stop(period)
        self._stream = Stream(
            parts.pipeline,
            parts.optimizer,
            max_norm=config.optimizer.clip_norm or math.inf,
            learning_rate=lambda batch: learning_rates(parts.optimizer, batch, config.steps, config.optimizer),
            discount=cast(Discount, kind),
            discount_updates=num_updates,
            scale_by_replicas=config.optimizer.replica_scaling,
            on_update=self._came,
            stop_before=self.stop.before,
        )

    def run(self, batches: Batches, count: int, live: Live) -> Iterator[dict[str, Any]]:
        """Stream over `count` batches and drain; the metrics of each afterwards.

        Args:
            batches: inputs and targets, where this process reads them.
            count: number of batches.
            live: called with each loss but the last, on process 0.
        """
        self._parts.journal.enter(f"steps {self.done + 1} to {self.done + count}", patient=False)
        try:
            rows = self._run(batches, count, live)
        finally:
            for row in self._known:  # of a run that failed
                self._parts.journal.write(row)
        for row in rows:
            self._parts.journal.write(row)
            yield row

    def _run(self, batches: Batches, count: int, live: Live) -> list[dict[str, Any]]:
        first = self.done + 1
        self._live, self._first, self._last = live, first, first + count - 1
        self._begun, self._known = time.perf_counter(), []
        self._stream.num_batches = self.done
        updates = self._stream.run(map(self._inputs, batches), count)
        count = len(updates)  # fewer where a signal asked the run to end
        self._last = first + count - 1
        self.done += count
        ended = time.perf_counter()
        program = self._stream.program(count)
        numbers = cost_numbers(self._parts.pipeline, self._parts.pipeline.records, self._parts.group)
        held = torch.zeros(self._parts.pipeline.schedule.num_ranks, dtype=torch.float64)
        for rank, versions in self._stream.peak_weight_versions.items():
            held[rank] = versions if self._parts.group.leads else 0
        preemption = self._parts.group.preemption
        asked = torch.tensor([self.stop.asked], dtype=torch.float64)
        summed, total_asked = self._parts.group.sum(torch.cat([held, numbers, asked])).tensor_split([-1])
        if total_asked and not preemption.agreed:
            preemption.agree()
        cost = read_cost(summed[len(held) :], program.schedule, self._parts.group.size)
        self._records = gathered_records(self._parts.group, self._parts.pipeline.records)
        collectives = self._parts.pipeline.collectives
        self._collectives = gathered_collectives(self._parts.group, collectives, program.schedule.num_ranks)
        self._parts.predictor.observe(cost)
        self._parts.predictor.observe_records(program, self._records)
        timing = {
            **cost_metrics(cost, self._parts.predictor, program, self._parts.group),
            "weight_versions": [int(value) for value in summed[: len(held)].tolist()],
        }
        rows = []
        moments = _moments(self._records, program.schedule, count, self._begun, ended)
        for step, (update, (begin, end)) in enumerate(zip(updates, pairwise(moments), strict=True), first):
            seconds = max(end - begin, 1e-9)
            row = {"step": step, "loss": update.loss, "grad_norm": update.grad_norm, "lr": self._rate(step - 1)}
            row |= {"tokens_per_second": self._tokens / seconds, "step_seconds": seconds} | timing
            rows.append(row | declared_metrics(update.auxiliary_losses, update.observations))
        self._known = []
        return rows

    def _inputs(self, batch: TokenBatch) -> tuple[Value, Value]:
        self._parts.journal.count_step()  # the stream reads the batch of a step when it begins
        return batch.inputs, batch.targets

    def timelines(self) -> tuple[Timeline, Timeline] | None:
        """The end of the last run as measured, and a stream of that length as predicted, on process 0."""
        if self._parts.group.rank != 0:
            return None
        schedule, records = _window(self._records, self._stream.program(self._last + 1 - self._first).schedule)
        return measured_timeline(schedule, records, collectives=self._collectives), self._parts.predictor.predict(
            lower(schedule)
        )

    def _rate(self, batch: int) -> float:
        return learning_rate(batch, self._parts.config.steps, self._parts.config.optimizer)

    def _came(self, batch: int, loss: float) -> None:
        self._known.append({"step": batch + 1, "loss": loss, "lr": self._rate(batch)})
        if self._live is not None and batch + 1 < self._last:  # the last one comes with all its metrics
            seconds = max(time.perf_counter() - self._begun, 1e-9)
            self._live(batch + 1, loss, self._tokens * (batch + 2 - self._first) / seconds)


def _moments(records: Records, schedule: Schedule, count: int, begun: float, ended: float) -> list[float]:
    """When the run began, when each batch but the last was through the last stage, and when the run ended.

    Ranks keep records of the end of a long run only; earlier batches share the remaining time evenly.
    """
    size, last = schedule.num_microbatches // count, schedule.num_stages - 1
    through: dict[int, float] = {}
    for _, rows in records:
        for action, _, end in rows:
            if action.stage == last and action.op in (Op.B, Op.W) and action.microbatch is not None:
                batch = action.microbatch // size
                through[batch] = max(through.get(batch, begun), end)
    known = sorted(through)[1:] if len(through) < count else sorted(through)  # the first may be there in part
    first = min(known, default=count)
    share = ((through[first] if known else ended) - begun) / (first + 1)
    moments = [begun, *(begun + share * (batch + 1) for batch in range(first)), *(through[batch] for batch in known)]
    return [*accumulate(moments[:count], max), ended]


def _window(records: Records, schedule: Schedule) -> tuple[Schedule, list[list[tuple[Action, float, float]]]]:
    """The last micro-batches of a run, at most `_MOST_SHOWN`, of which all ranks have all records; counted from 0."""
    total = schedule.num_microbatches
    intervals = [schedule.update_interval(stage) for stage in range(schedule.num_stages)]
    whole = Counter(action.microbatch for _, rows in records for action, _, _ in rows if action.op in COMPUTE_OPS)
    most = max(whole.values())
    first = max((b + 1 for b in range(total) if whole[b] < most), default=0)
    period = schedule.update_period
    shown = max(period, min(total - first, _MOST_SHOWN) // period * period)
    first = total - shown
    found = []
    for _, rows in records:
        kept = []
        for action, start, end in rows:
            number = (action.microbatch or 0) - (first // intervals[action.stage] if action.op is Op.STEP else first)
            if number >= 0:
                kept.append((action._replace(microbatch=number), start, end))
        found.append(kept)
    return stretch(schedule, shown), found
