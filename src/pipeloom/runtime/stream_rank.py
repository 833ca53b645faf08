"""`StreamRank`: one rank's part in a run of a stream.

Actions become functions as they come up, not before: a stream may be long. What a flushed step has not:

    F, I             with the version of the parameters that the weight policy gives the micro-batch
    B, W             likewise; what they add to the gradients goes into the sum of the micro-batch's update
    REDUCE_GRAD      the sum goes to the other replicas of the stage
    STEP             with what the others sent, the stage's next version is made
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

from pipeloom.errors import RunError
from pipeloom.ir import Action, Op, Program
from pipeloom.ir.schedule import Uses
from pipeloom.ir.versions import num_updates
from pipeloom.runtime.calls import call_number, num_samples_of
from pipeloom.runtime.driver import Run
from pipeloom.runtime.ownership import Ownership
from pipeloom.runtime.replica_gradients import Mailbox, ReplicaGradients
from pipeloom.runtime.state import Step, unequal_lengths
from pipeloom.runtime.stream_batches import StreamBatches
from pipeloom.runtime.stream_updates import StageUpdate, StreamOptimizer
from pipeloom.runtime.weight_versions import WeightVersions
from pipeloom.runtime.worker import BLACKBOX_BYTES, Record, Worker, label_of

_NUM_RECORDS = 1 << 16  # the last so many are kept


@dataclass(frozen=True)
class StreamPlan:
    """What all ranks of one run know.

    Attributes:
        program: of the whole run.
        used: the version of each stage and micro-batch.
        call: the number of this run among the pipeline's calls.
        batches_before: how many batches ran before this run.
    """

    program: Program
    used: Uses
    call: int
    batches_before: int

    @property
    def batch_size(self) -> int:
        """Micro-batches of a batch."""
        assert self.program.schedule.microbatches_per_update is not None
        return self.program.schedule.microbatches_per_update

    def microbatches_of(self, stage: int, update: int) -> range:
        """What an update of a stage holds, on all its replicas."""
        interval = self.program.schedule.update_interval(stage)
        return range(update * interval, (update + 1) * interval)

    def describe(self, stage: int, update: int) -> StageUpdate:
        held = self.microbatches_of(stage, update)
        num_batches = len(held) // self.batch_size
        return StageUpdate(
            stage=stage,
            update=update,
            batch=self.batches_before + held.stop // self.batch_size - 1,
            num_batches=num_batches,
            num_before=self.batches_before // num_batches + update,
            delay=update - min(self.used[stage, b] for b in held),
        )


class StreamRank:
    """Runs one rank's part of a stream once.

    Args:
        worker: of the rank.
        plan: of the run.
        batches: of this process.
        optimizer: of this process.
        ownership: of this process.
        on_losses: called on ranks with the last stage, behind each of its updates, with the losses of the micro-batches
            that ran here, each times its share of its batch.
        poll: called behind every update.

    Attributes:
        norms: by stage and update, of the gradient before clipping.
        peak_weight_versions: the most versions of one stage that existed at once.
        peak_weight_bytes: of the parameters of all stages in all versions.
    """

    def __init__(
        self,
        worker: Worker,
        plan: StreamPlan,
        batches: StreamBatches,
        optimizer: StreamOptimizer,
        ownership: Ownership,
        on_losses: Callable[[dict[int, float]], None],
        poll: Callable[[], None],
    ) -> None:
        self._worker, self._plan, self._batches, self._optimizer = worker, plan, batches, optimizer
        self._ownership, self._on_losses, self._poll = ownership, on_losses, poll
        self._num_samples: dict[int, int] = {}  # of batches, as other ranks said
        self._records: deque[Record] = deque(maxlen=_NUM_RECORDS)
        self._weights: dict[int, WeightVersions] = {}
        self._replicas: dict[int, ReplicaGradients] = {}
        self.norms: dict[tuple[int, int], float] = {}
        self.peak_weight_versions = 0
        self.peak_weight_bytes = 0

    def records(self) -> Iterable[Record]:
        """What ran when; of a long run, the last of it."""
        return self._records

    def run(self) -> Run:
        """The whole run; yields whenever it has to wait and the transport does not block."""
        worker, state = self._worker, self._worker.state
        action: Action | None = None
        state.begin(self._batches.batch, self._plan.call)
        try:
            self._begin()
            for action in self._plan.program.orders[worker.rank]:
                for run, ready in self._steps(action):
                    while ready is not None and not state.transport.blocking and not ready():
                        yield
                    if worker.blackbox is not None:
                        worker.blackbox[:BLACKBOX_BYTES] = label_of(action)
                    start = perf_counter()
                    run()
                    self._records.append((action, start, perf_counter()))
        except Exception as error:
            if action is None:
                raise
            raise worker.explain(error, action) from error
        finally:
            for weights in self._weights.values():
                weights.close()
            state.clear()

    def _begin(self) -> None:
        """Make version 0 of every stage, and what replicas need."""
        rank, schedule = self._worker.rank, self._plan.program.schedule
        uses: dict[int, Counter[int]] = {stage: Counter() for stage in self._worker.stages}
        for action in schedule.orders[rank]:
            if action.op in (Op.B, Op.W):
                assert action.microbatch is not None
                uses[action.stage][self._plan.used[action.stage, action.microbatch]] += 1
        mailboxes: dict[int, Mailbox] = {}
        for stage, module in self._worker.stages.items():
            self._weights[stage] = WeightVersions(module, uses[stage])
            replicas = schedule.placement.replicas[stage]
            if len(replicas) > 1:
                for peer in replicas:
                    if peer != rank and peer not in mailboxes:
                        mailboxes[peer] = Mailbox(rank, peer, self._worker.state.transport, self._plan.call)
                named = {name: p for name, p in module.named_parameters() if p.requires_grad}
                buffers = self._ownership.replica_buffers(rank, stage)
                self._replicas[stage] = ReplicaGradients(
                    rank, stage, replicas, named, buffers, mailboxes, num_updates(schedule, stage)
                )
        self._note_peaks()

    def _steps(self, action: Action) -> list[Step]:
        if action.op is Op.STEP:
            return self._update_steps(action)
        assert action.microbatch is not None
        if action.op is Op.REDUCE_GRAD:
            update = action.microbatch // self._plan.program.schedule.update_interval(action.stage)
            weights, replicas = self._weights[action.stage], self._replicas[action.stage]
            return [(lambda: replicas.send(update, weights.gradients(update)), None)]
        ((run, ready),) = self._worker.steps(action, self._plan.program)
        if action.op in (Op.F, Op.I):
            run = self._with_version(action, run)
        elif action.op in (Op.B, Op.W):
            run = self._into_sum(action, run)
        return [(self._as_part_of(action.microbatch // self._plan.batch_size, run), ready)]

    def _as_part_of(self, batch: int, run: Callable[[], None]) -> Callable[[], None]:
        """Messages say how many samples their batch has, so far as this rank knows that."""
        state, count = self._worker.state, self._plan.call

        def numbered() -> None:
            known = self._num_samples.get(batch, 0)
            state.call = count + call_number(0, False, known or self._batches.num_samples.get(batch, 0))
            run()
            said, own = num_samples_of(state.call), self._batches.num_samples.get(batch, 0)
            if said and own and said != own:
                raise RunError(unequal_lengths(*((own, said) if self._batches.batch.inputs else (said, own))))
            self._num_samples[batch] = said

        return numbered

    def _with_version(self, action: Action, run: Callable[[], None]) -> Callable[[], None]:
        stage, _, microbatch, _ = action
        assert microbatch is not None
        weights, version = self._weights[stage], self._plan.used[stage, microbatch]

        def forward() -> None:
            weights.install(version)
            run()

        return forward

    def _into_sum(self, action: Action, run: Callable[[], None]) -> Callable[[], None]:
        stage, _, microbatch, _ = action
        assert microbatch is not None
        weights, version = self._weights[stage], self._plan.used[stage, microbatch]
        update = microbatch // self._plan.program.schedule.update_interval(stage)

        def backward() -> None:
            weights.begin_backward(version, update)
            run()
            weights.end_backward(version, update)

        return backward

    def _update_steps(self, action: Action) -> list[Step]:
        """Wait for the other replicas, then update."""
        stage, update = action.stage, action.microbatch
        assert update is not None
        weights, replicas = self._weights[stage], self._replicas.get(stage)
        what = self._plan.describe(stage, update)

        def step() -> None:
            losses = self._losses_of(stage, update)
            gradients = weights.gradients(update)
            if replicas is not None:
                gradients = replicas.total(update, gradients)
            found = [gradient for gradient in gradients if gradient is not None]
            if what.num_batches > 1 and found:  # of every batch they are the mean over its samples
                torch._foreach_mul_(found, 1 / what.num_batches)
            self.norms[stage, update] = self._optimizer.apply(weights, gradients, what)
            self._note_peaks()
            if losses:
                self._on_losses(losses)
            self._poll()

        return [*(replicas.receives(update) if replicas is not None else ()), (step, None)]

    def _losses_of(self, stage: int, update: int) -> dict[int, float]:
        """Where `stage` is the last one, the losses of the update's micro-batches that ran here; to be called once."""
        schedule, rank = self._plan.program.schedule, self._worker.rank
        if stage < schedule.num_stages - 1:
            return {}
        held = [b for b in self._plan.microbatches_of(stage, update) if schedule.placement.rank_of(stage, b) == rank]
        losses = {b: float(self._worker.state.batch.losses.pop(b)) for b in held}
        wrong = next((b for b, loss in losses.items() if not math.isfinite(loss)), None)
        if wrong is not None:
            raise RunError(
                f"the loss of micro-batch {wrong} is {losses[wrong]}: training cannot go on from there; lower the "
                "learning rate, or go on from an earlier state"
            )
        return losses

    def _note_peaks(self) -> None:
        stages = self._weights.values()
        self.peak_weight_versions = max(weights.peak_versions for weights in stages)
        self.peak_weight_bytes = sum(weights.peak_bytes for weights in stages)
