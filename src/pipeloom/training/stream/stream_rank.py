"""`StreamRank`: one rank's part in a run of a stream.

A long run is bound to functions block by block. (Its program is made beforehand, in time linear in its length: some
seconds for 20,000 micro-batches on 4 ranks, once for all runs of one length.)

Actions do more than in a step of a synchronous schedule:

    F, I             use the version of the parameters that the weight policy assigns to the micro-batch
    B, W             use that version too, and add their gradients to the sum of the micro-batch's update
    REDUCE_GRAD      sends the sum to the other replicas of the stage
    STEP             adds the sums of the other replicas, and makes the stage's next version
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipeloom.common.division import even_parts
from pipeloom.engine.batch import sample_mismatch
from pipeloom.engine.instructions import Run
from pipeloom.engine.rank_state import Record, Step
from pipeloom.engine.stores.ownership import Ownership
from pipeloom.engine.worker import Worker
from pipeloom.errors import RunError
from pipeloom.ir import Action, Op, Program
from pipeloom.ir.versions import num_updates
from pipeloom.training.stream.batches import StreamBatches
from pipeloom.training.stream.observed import StreamObservations
from pipeloom.training.stream.replica_gradients import Mailbox, ReplicaGradients
from pipeloom.training.stream.stream_optimizer import StreamOptimizer
from pipeloom.training.stream.update_options import StageUpdate
from pipeloom.training.stream.weight_versions import WeightVersions
from pipeloom.transport.call_numbers import Call, call_number, num_samples_of

StopBefore = Callable[[int], int | None]

_NUM_RECORDS = 1 << 16  # kept of the end of a run
_BLOCK = 1 << 13  # actions that are bound at once: a kilobyte or two each


@dataclass(frozen=True)
class StreamPlan:
    """One run of a stream, the same on all ranks.

    Attributes:
        program: of the whole run.
        used: for each stage and micro-batch, the version that it uses.
        call: the call number of this run.
        batches_before: how many batches ran before this run.
    """

    program: Program
    used: Mapping[tuple[int, int], int]
    call: int
    batches_before: int

    @property
    def batch_size(self) -> int:
        """Micro-batches per batch."""
        assert self.program.schedule.microbatches_per_update is not None
        return self.program.schedule.microbatches_per_update

    def microbatches_of(self, stage: int, update: int) -> range:
        """The micro-batches of an update of a stage, on all its replicas."""
        interval = self.program.schedule.update_interval(stage)
        return range(update * interval, (update + 1) * interval)

    def describe(self, stage: int, update: int) -> StageUpdate:
        """The `StageUpdate` of an update of a stage."""
        held = self.microbatches_of(stage, update)
        num_batches = len(held) // self.batch_size
        return StageUpdate(
            stage=stage,
            update=update,
            batch=self.batches_before + held.stop // self.batch_size - 1,
            num_batches=num_batches,
            num_input_batches=len(self.microbatches_of(0, 0)) // self.batch_size,
            num_before=self.batches_before // num_batches + update,
            delay=update - min(self.used[stage, b] for b in held),
        )


class StreamRank:
    """Runs one rank's part of a stream once.

    Args:
        worker: of the rank.
        plan: of the run; the same on all ranks.
        batches, optimizer, ownership, observed: of this process.
        on_losses: called on ranks with the last stage, after each of its updates, with the losses of the micro-batches
            that ran here, each times its share of its batch.
        poll: called after every update.
        stop_before: as of `Stream`.

    Attributes:
        stopped_before: the batch of this run before which it was stopped; None: all batches ran.
        norms: by stage and update, of the gradient before clipping.
        records: when each action ran; of a long run only its end.
        peak_weight_bytes: the peak bytes of parameters of all stages that require a gradient, in all versions.
    """

    def __init__(
        self,
        worker: Worker,
        plan: StreamPlan,
        batches: StreamBatches,
        optimizer: StreamOptimizer,
        ownership: Ownership,
        observed: StreamObservations,
        on_losses: Callable[[dict[int, float]], None],
        poll: Callable[[], None],
        stop_before: StopBefore | None = None,
    ) -> None:
        self._worker, self._plan, self._batches, self._optimizer = worker, plan, batches, optimizer
        self._ownership, self._observed, self._on_losses, self._poll = ownership, observed, on_losses, poll
        self._stop_before, self._newest = stop_before, -1
        self.stopped_before: int | None = None
        self._calls: dict[int, int] = {}  # by batch: the call number of its messages, which has its number of samples
        self._weights: dict[int, WeightVersions] = {}
        self._replicas: dict[int, ReplicaGradients] = {}
        self._rates: dict[tuple[int, int], list[float] | None] = {}  # by stage and update: as sent to replicas
        self._last_stage = plan.program.schedule.num_stages - 1
        self._intervals = {stage: plan.program.schedule.update_interval(stage) for stage in worker.stages}
        self.norms: dict[tuple[int, int], float] = {}
        self.records: deque[Record] = deque(maxlen=_NUM_RECORDS)
        self.peak_weight_bytes = 0

    @property
    def peak_weight_versions(self) -> int:
        """The most versions of one stage that existed at once."""
        return max(weights.peak_versions for weights in self._weights.values())

    def run(self) -> Run:
        """The whole run; yields where it has to wait and the transport does not block."""
        worker, state = self._worker, self._worker.state
        state.begin(self._batches.batch, self._plan.call)
        state.count_samples = self._count_samples
        try:
            self._begin()
            order = self._plan.program.orders[worker.rank]
            for first in range(0, len(order), _BLOCK):
                left = yield from self._run(order[first : first + _BLOCK])
                if left is not None:
                    rest = self._before_stop((*left, *order[first + _BLOCK :]))
                    for begin in range(0, len(rest), _BLOCK):
                        yield from self._run(rest[begin : begin + _BLOCK])
                    break
        finally:
            for weights in self._weights.values():
                weights.close()
            state.clear()
            state.count_samples = None

    def _run(self, actions: Sequence[Action]) -> Generator[None, None, Sequence[Action] | None]:
        """Run `actions` in order; returns those from which on some are to be left out, because the run stops early."""
        block = self._worker.bind_steps((a, step) for a in actions for step in self._steps(a))
        try:
            start = 0
            for position, instruction in enumerate(block):
                action = instruction.action
                batch = -1 if action.op is Op.STEP else (action.microbatch or 0) // self._plan.batch_size
                if self._stop_before is None or batch <= self._newest:
                    continue
                yield from block.run(start, position)
                start, self._newest = position, batch
                if self._stops(batch):
                    return actions[actions.index(action) :]
            yield from block.run(start)
        finally:
            self.records.extend(record for record in block.records() if record[2])  # what did not run has 0.0
        return None

    def _stops(self, batch: int) -> bool:
        """Asks before the first action of a batch whether the run stops, and whether before this batch."""
        assert self._stop_before is not None
        found = self._stop_before(self._plan.batches_before + batch)
        if found is not None and self.stopped_before is None:
            stop = found - self._plan.batches_before
            if stop >= self._plan.program.num_microbatches // self._plan.batch_size:
                return False  # it ends there or earlier
            self.stopped_before = stop
            for stage, replicas in self._replicas.items():
                replicas.shorten(stop * self._plan.batch_size // self._intervals[stage] - 1)
        return self.stopped_before is not None and batch >= self.stopped_before

    def _before_stop(self, order: Sequence[Action]) -> list[Action]:
        """The actions of the batches that run."""
        assert self.stopped_before is not None
        stop, kept = self.stopped_before * self._plan.batch_size, []
        for action in order:
            assert action.microbatch is not None
            last = action.microbatch
            if action.op is Op.STEP:
                last = self._plan.microbatches_of(action.stage, last).stop - 1
            if last < stop:
                kept.append(action)
        return kept

    def _begin(self) -> None:
        """Make version 0 of every stage, and the exchanges of its replicas."""
        rank, schedule = self._worker.rank, self._plan.program.schedule
        uses: dict[int, Counter[int]] = {stage: Counter() for stage in self._worker.stages}
        for action in schedule.orders[rank]:
            if action.op in (Op.B, Op.W):
                assert action.microbatch is not None
                uses[action.stage][self._plan.used[action.stage, action.microbatch]] += 1
        mailboxes: dict[int, Mailbox] = {}
        for stage, module in self._worker.stages.items():
            self._weights[stage] = WeightVersions(module, uses[stage], self._optimizer.trained)
            replicas = schedule.placement.replicas[stage]
            if len(replicas) > 1:
                for peer in replicas:
                    if peer != rank and peer not in mailboxes:
                        mailboxes[peer] = Mailbox(rank, peer, self._worker.state.wiring.transport, self._plan.call)
                shared = {name: (p, replicas) for name, p in module.named_parameters() if p.requires_grad}
                buffers = self._ownership.replica_buffers(rank, stage)
                last = num_updates(schedule, stage) - 1
                self._replicas[stage] = ReplicaGradients(rank, stage, shared, buffers, mailboxes, last)
        self._note_bytes()

    def _note_bytes(self) -> None:
        held = sum(weights.num_bytes for weights in self._weights.values())
        self.peak_weight_bytes = max(self.peak_weight_bytes, held)

    def _steps(self, action: Action) -> list[Step]:
        stage, op, number, _ = action
        assert number is not None
        if op is Op.STEP:  # waits for the other replicas, then updates
            replicas = self._replicas.get(stage)
            received = [] if replicas is None else replicas.receives(number)
            return [*received, (partial(self._update, self._plan.describe(stage, number)), None)]
        if op is Op.REDUCE_GRAD:
            return [(partial(self._send_gradients, stage, number // self._intervals[stage]), None)]
        ((run, ready),) = self._worker.steps(action, self._plan.program)
        if op not in (Op.F, Op.I, Op.B, Op.W):
            state, calls, unknown = self._worker.state, self._calls, self._plan.call
            batch = number // self._plan.batch_size

            def message() -> None:  # has the call number of its batch, which has the number of samples once it is known
                state.call = calls.get(batch, unknown)
                run()
                calls[batch] = state.call

            return [(message, ready)]
        weights, version = self._weights[stage], self._plan.used[stage, number]
        if op in (Op.F, Op.I):
            reads, install = op is Op.F and stage in (0, self._last_stage), weights.install

            def forward() -> None:
                if reads:
                    self._read(number)
                install(version)
                run()

            return [(forward, ready)]
        update, begin, end = number // self._intervals[stage], weights.begin_backward, weights.end_backward

        def backward() -> None:
            begin(version, update)
            run()
            end(version, update)

        return [(backward, ready)]

    def _read(self, microbatch: int) -> None:
        """Take the batch, and compare its number of samples with that of other ranks."""
        batches, batch = self._batches, microbatch // self._plan.batch_size
        batches.take_until(microbatch)
        own, said = batches.num_samples[batch], num_samples_of(self._calls.get(batch, 0))
        if said and own != said:
            pair = (own, said) if batches.batch.inputs else (said, own)
            raise RunError(f"batch {batch}: {sample_mismatch(*pair)}")
        self._calls[batch] = self._plan.call + call_number(0, Call.FORWARD, own)

    def _count_samples(self, microbatch: int) -> tuple[int, int]:
        """The samples of a micro-batch that has arrived here, and of its batch."""
        batch, place = divmod(microbatch, self._plan.batch_size)
        count = num_samples_of(self._calls[batch])
        return even_parts(count, self._plan.batch_size)[place], count

    def _send_gradients(self, stage: int, update: int) -> None:
        weights = self._weights[stage]
        rates = self._rates[stage, update] = self._optimizer.rates(self._plan.describe(stage, update))
        each = None if rates is None else self._optimizer.rate_of_each(weights.parameters, rates)
        self._replicas[stage].send(update, weights.gradients(update), each)

    def _update(self, what: StageUpdate) -> None:
        stage, update = what.stage, what.update
        weights, replicas = self._weights[stage], self._replicas.get(stage)
        losses = self._losses_of(update) if stage == self._last_stage else {}
        gradients = weights.gradients(update)
        if replicas is not None:
            gradients, rates = replicas.total(update, gradients), self._rates.pop((stage, update))
        else:
            rates = self._optimizer.rates(what)
        if what.num_batches > 1:  # a sum of means over the samples of single batches
            found = [gradient for gradient in gradients if gradient is not None]
            if found:
                torch._foreach_mul_(found, 1 / what.num_batches)
        self.norms[stage, update] = self._optimizer.apply(weights, gradients, what, rates)
        self._observed.update(self._worker, stage, self._plan.microbatches_of(stage, update))
        self._note_bytes()
        if losses:
            self._on_losses(losses)
        self._poll()

    def _losses_of(self, update: int) -> dict[int, float]:
        """The losses of the update's micro-batches that ran here on the last stage. Call it once per update."""
        stage, place = self._last_stage, self._plan.program.placement
        held = [b for b in self._plan.microbatches_of(stage, update) if place.rank_of(stage, b) == self._worker.rank]
        losses = {b: float(self._worker.state.batch.losses.pop(b)) for b in held}
        wrong = next((b for b, loss in losses.items() if not math.isfinite(loss)), None)
        if wrong is not None:
            raise RunError(
                f"the loss of micro-batch {wrong} is {losses[wrong]}: training cannot continue. Lower the learning "
                "rate, or continue from an earlier checkpoint."
            )
        return losses
