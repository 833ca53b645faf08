"""`Stream`: training in which parameters change while micro-batches are in flight (PipeDream and its family).

A run has a warm-up, a steady state in which every stage alternates F and B and updates its own parameters, and a
cool-down.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pipeloom.errors import InputError, shortened
from pipeloom.ir import Program, check
from pipeloom.ir.versions import check_drained, versions_used
from pipeloom.passes import lower, stretch
from pipeloom.processes.agreement import first_difference, gather_json
from pipeloom.training.losses.watched_loss import tell
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stream.batches import StreamBatches
from pipeloom.training.stream.observed import check_listeners
from pipeloom.training.stream.results import OnUpdate, StreamUpdate
from pipeloom.training.stream.run import StreamRun
from pipeloom.training.stream.stream_optimizer import Rules, StreamOptimizer
from pipeloom.training.stream.stream_rank import StopBefore, StreamPlan
from pipeloom.training.stream.update_options import Discount, LearningRate, UpdateOptions
from pipeloom.transport.call_numbers import Call, call_number


class Stream:
    """Trains a pipeline with an asynchronous schedule: `pipedream`, `pipedream-2bw`, or one of your own.

    The schedule's weight policy says which version of the parameters a micro-batch uses (see `pipeloom.ir.versions`). A
    batch has `microbatches_per_update` micro-batches. A stage updates after every batch, or after several batches where
    it has more replicas than a batch has micro-batches. Its gradient is the mean over these batches, and that of a
    batch the mean over its samples.

    Buffers have no versions: forwards change them one after another (running statistics of BatchNorm). After a run all
    replicas of a stage have the buffers of the first one. Dropout masks are those of the micro-batch's own forward.

    Args:
        pipeline: with a loss, and a schedule whose weight policy is not "flush".
        optimizer: over all or some of the parameters that this process holds. It must not change parameters without a
            gradient; torch's optimizers do not. None where this process holds no parameter that requires a gradient.
        max_norm: largest 2-norm of all gradients together. No stage waits for another: each clips its own gradient to
            ``max_norm / sqrt(num_stages)``.
        learning_rate: called before every update of a stage with the index of its last batch, counted over all runs;
            returns the learning rate, or one per parameter group. None: the learning rate of each group.
        discount: the divisor of the learning rate of a stage whose gradient is stale by d updates. "inverse":
            ``max(d, 1)`` (arXiv:1511.05950); "pipemare": ``d ** (1 - min(k / discount_updates, 1))`` in its update k
            (arXiv:1910.05124); "none": 1.
        discount_updates: for "pipemare".
        scale_by_replicas: multiply the learning rate of a stage by its number of batches per update, divided by that of
            the input stage. With one micro-batch per batch this is PipeDream's ``r_s / r_0``.
        on_update: called with the index and the loss of every batch, in order, on the process with rank 0, soon after
            the batch has left the pipeline.
        num_batches: number of batches run before, for training that continues from a checkpoint.
        stop_before: called on each rank before its first action of a batch, with the index of the batch, counted over
            all runs; returns the batch before which the run drains, None as long as it is not to drain early. All ranks
            must learn it before they begin the batches of the last updates that are made.

    Attributes:
        num_updates: for each rank of this process and each of its stages, the number of updates in the last run, also
            if it failed.
        peak_weight_versions: for each rank of this process, the most versions of a stage's parameters that existed at
            once in the last run.
        peak_weight_bytes: for each rank of this process, the peak bytes of its parameters that require a gradient, in
            all versions.

    Raises:
        InputError: an argument is invalid.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        max_norm: float = math.inf,
        learning_rate: LearningRate | None = None,
        discount: Discount = "none",
        discount_updates: int | None = None,
        scale_by_replicas: bool = False,
        on_update: OnUpdate | None = None,
        num_batches: int = 0,
        stop_before: StopBefore | None = None,
    ) -> None:
        schedule = pipeline.schedule
        if schedule.microbatches_per_update is None:
            raise InputError(
                f"Stream of schedule {schedule.name!r}: a synchronous schedule has no weight versions. Call "
                "Pipeline.step(), or use a schedule such as pipedream."
            )
        if on_update is not None and not callable(on_update):
            raise InputError(f"on_update={on_update!r}: must be callable. Pass a function of a batch and its loss.")
        check_listeners(pipeline.executor.workers, schedule)
        self._pipeline = pipeline
        self._options = UpdateOptions(
            max_norm=max_norm,
            learning_rate=learning_rate,
            discount=discount,
            discount_updates=discount_updates,
            scale_by_replicas=scale_by_replicas,
        )
        self._optimizer = StreamOptimizer(optimizer, self._options, pipeline)
        self._on_update, self._stop_before = on_update, stop_before
        self._microbatches = schedule.microbatches_per_update
        self._last_length: tuple[Program, Mapping[tuple[int, int], int]] | None = None
        self.num_batches = num_batches
        self.num_updates: dict[int, dict[int, int]] = {}
        self.peak_weight_versions: dict[int, int] = {}
        self.peak_weight_bytes: dict[int, int] = {}

    @property
    def num_batches(self) -> int:
        """Number of batches in completed runs. Set it to continue from a checkpoint."""
        return self._num_batches

    @num_batches.setter
    def num_batches(self, count: int) -> None:
        count = _integer(count, least=0)
        check_drained(self._pipeline.schedule, count, f"num_batches={count}")
        self._num_batches = count

    def run(self, batches: Iterable[Any] | None, num_batches: int | None = None) -> list[StreamUpdate]:
        """Train on `batches`. Every rank calls it with the same number of batches.

        Afterwards all updates are made, no micro-batch is in flight, and the modules hold the parameters of the
        optimizer. The memory of a parameter may have changed: call ``.data``, ``detach()`` or `state_dict` again.

        Args:
            batches: ``(inputs, targets)`` of each batch, samples along dimension 0, taken one by one when needed. Ranks
                with the first stage read inputs, ranks with the last stage targets; what a rank does not read may be
                None. Other ranks may pass None with `num_batches`.
            num_batches: number of batches to take. None: all, if `batches` has a length.

        Returns:
            Loss and gradient norm of every batch that ran, on every rank.

        Raises:
            InputError: before any communication: a stage would not make an integer number of updates, parameters have
                gradients, or ranks differ in their arguments.
            CallerError: `batches`, `learning_rate` or `on_update` raised, or returned an invalid value.
            RunError: a loss or a gradient is not finite, the optimizer has one state for several stages, or a peer
                ended (PeerLost).
            StageError: a stage, the loss or the optimizer raised. The modules then hold the user's parameters again,
                with the updates that were made.
        """
        count = self._count(batches, num_batches)
        executor = self._pipeline.executor
        executor.check_free()
        self._pipeline.state.check_values()
        self._pipeline.state.check_around()
        rates = self._check_ready()
        program, used = self._prepared(count)
        taken = StreamBatches(batches, count, program.schedule, executor.local_ranks, executor.batching.loss_fn)
        live = self._agree(count, rates)
        plan = StreamPlan(program, used, call_number(executor.num_calls + 1, Call.STEP), self.num_batches)
        run = StreamRun(
            self._pipeline,
            plan,
            taken,
            self._optimizer,
            on_update=self._on_update,
            live=live,
            stop_before=self._stop_before,
            program_of=self.program,
        )
        try:
            updates = run.run()
        finally:
            self.num_updates = run.num_updates()
        tell(executor.batching.loss_fn)
        self.num_batches += len(updates)
        self.peak_weight_versions = {rank: part.peak_weight_versions for rank, part in run.ranks.items()}
        self.peak_weight_bytes = {rank: part.peak_weight_bytes for rank, part in run.ranks.items()}
        return updates

    def _count(self, batches: Any, num_batches: int | None) -> int:
        try:
            length = len(batches)
        except TypeError:  # such as of a DataLoader over an iterable data set
            length = None
        if num_batches is None and length is None:
            raise InputError(
                f"batches is a {type(batches).__name__} without a length: a run needs the number of its batches. Pass "
                "num_batches."
            )
        count = _integer(length if num_batches is None else num_batches, least=1)
        reads = self._pipeline.needs_inputs or self._pipeline.needs_targets
        if reads and not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise InputError(
                f"batches is a {type(batches).__name__}: ranks with the first or the last stage take pairs (inputs, "
                "targets) from them. Pass an iterable."
            )
        if reads and length is not None and length < count:
            raise InputError(
                f"num_batches={count}: `batches` has only {length}. Pass more batches, or a smaller num_batches."
            )
        return count

    def _check_ready(self) -> list[float] | None:
        """Check that a run can start; returns the learning rates for the first batch."""
        pipeline = self._pipeline
        self._optimizer.check()
        rates = self._optimizer.asked_rates(self.num_batches)
        if pipeline.executor.batching.loss_fn is None:
            raise InputError("run() on a Pipeline without loss_fn: training needs a loss. Pass loss_fn to Pipeline.")
        if not torch.is_grad_enabled():
            raise InputError("run() inside torch.no_grad(): training needs gradients. Call it outside.")
        for name, parameter in pipeline.named_parameters():
            if parameter.grad is not None:
                raise InputError(
                    f"parameter {name!r} has a gradient: a stream updates only by its own gradients. Call "
                    "optimizer.zero_grad() before run()."
                )
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise InputError(
                    f"parameter {name!r} has a post-accumulate-grad hook: a stream accumulates gradients on versions "
                    "of a parameter, where the hook would not run. Remove the hook."
                )
        pipeline.state.check_equal()
        return rates

    def program(self, num_batches: int) -> Program:
        """The program of a run of `num_batches` batches."""
        return self._prepared(num_batches)[0]

    def _prepared(self, count: int) -> tuple[Program, Mapping[tuple[int, int], int]]:
        """The program of a run of `count` batches, and the version that each stage and micro-batch uses."""
        length = count * self._microbatches
        if self._last_length is None or self._last_length[0].num_microbatches != length:
            schedule = stretch(self._pipeline.schedule, length)
            check(schedule)
            self._last_length = lower(schedule), versions_used(schedule)
        return self._last_length

    def _agree(self, count: int, rates: list[float] | None) -> bool:
        """Compare with all other processes, the only communication before a run; returns whether rank 0 reports.

        Raises:
            InputError: ranks, or replicas of a stage, are about to do different things. PeerLost: a process ended.
        """
        named = ("max_norm", "discount", "discount_updates", "scale_by_replicas")
        terms = {"batches": count, "batches before": self.num_batches}
        terms |= {name: getattr(self._options, name) for name in named}
        executor = self._pipeline.executor
        rules = {rank: self._optimizer.rules(rank, rates) for rank in executor.local_ranks}
        lost = "another rank ended before all began their run; see its error"
        own = [terms, rules, self._on_update is not None]
        gathered = gather_json(own, executor.connection.members, lost=lost)
        found = first_difference(enumerate(of_process for of_process, _, _ in gathered))
        if found is not None:
            raise InputError(
                f"rank {found.first} runs with {found.name} {found.one} and rank {found.rank} with {found.other}: all "
                "ranks must run the same stream. Pass the same on each."
            )
        of_rank: dict[int, Rules] = {int(rank): part for _, parts, _ in gathered for rank, part in parts.items()}
        for stage, replicas in enumerate(self._pipeline.schedule.placement.replicas):
            found = first_difference((rank, of_rank[rank].get(str(stage), {})) for rank in replicas)
            if found is not None:
                one, other = ("none" if rule is None else shortened(rule, 80) for rule in (found.one, found.other))
                raise InputError(
                    f"replicas of stage {stage} have {found.name} {one} on rank {found.first} and {other} on rank "
                    f"{found.rank}: replicas must make the same updates. Give their optimizers the same parameters, "
                    "options and learning rates."
                )
        live_on_first: bool = gathered[0][2]
        return live_on_first


def _integer(num_batches: Any, *, least: int) -> int:
    if isinstance(num_batches, bool) or not hasattr(num_batches, "__index__"):
        raise InputError(f"num_batches={num_batches!r}: must be an integer.")
    count = operator.index(num_batches)
    if count < least:
        raise InputError(f"num_batches={count}: must be at least {least}.")
    return count
