"""`Stream`: training in which parameters change while micro-batches are in flight (PipeDream and its family).

run:   start-up, then every stage alternates F and B, updating by itself behind every update's last B; drain
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.errors import InputError
from pipeloom.ir import Program, check
from pipeloom.ir.versions import check_drained, versions_used
from pipeloom.passes import lower, stretch
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stream.batches import StreamBatches, length_of
from pipeloom.training.stream.rank_run import StreamPlan, StreamRank
from pipeloom.training.stream.results import OnUpdate, StreamResults, StreamUpdate
from pipeloom.training.stream.stage_updates import StreamOptimizer
from pipeloom.training.stream.update_options import Discount, LearningRate, UpdateOptions
from pipeloom.training.stream.update_rules import agree
from pipeloom.transport.call_numbers import call_number


class Stream:
    """Trains a pipeline whose schedule updates while it runs: `pipedream`, `pipedream-2bw`, or one of your own.

    Which parameters a micro-batch meets is the schedule's weight policy (see `pipeloom.ir.versions`). A batch is
    `microbatches_per_update` micro-batches. A stage's update takes the mean over its batches of their gradients, each
    the mean over its samples: one batch, or several where the stage has more replicas than a batch has micro-batches.

    What has no versions: buffers change in the order of the forwards (running statistics of BatchNorm), with replicas
    they are those of the first one after a run. Dropout masks are those of the micro-batch's own forward.

    Args:
        pipeline: with a schedule that has a weight policy other than "flush", and a loss.
        optimizer: over parameters of `pipeline`, all that this process holds or some; any that leaves parameters
            without a gradient alone, as torch's do. None where this process holds no parameter that wants a gradient.
        max_norm: largest 2-norm of all gradients together. No stage waits for another: each clips its own gradient to
            ``max_norm / sqrt(num_stages)``.
        learning_rate: called before every update of a stage with the number of its last batch, from 0 over all runs;
            gives the learning rate, or one for each parameter group. None: that of each group.
        discount: what a stage whose gradient is stale by d updates divides its learning rate by. "inverse":
            ``max(d, 1)`` (arXiv:1511.05950); "pipemare": ``d ** (1 - min(k / discount_updates, 1))`` in its update k
            (arXiv:1910.05124); "none": 1.
        discount_updates: for "pipemare".
        scale_by_replicas: multiply the learning rate of a stage by the number of batches that its update holds
            over that of the input stage. With one micro-batch a batch, that is PipeDream's ``r_s / r_0``.
        on_update: called with the number and the loss of every batch, in order, on the process with rank 0, soon after
            the batch is through.
        num_batches: how many batches have been run before, such as before the checkpoint that training goes on from.

    Attributes:
        num_updates: for each rank of this process, of each of its stages: how many updates the last run made, also one
            that failed.
        peak_weight_versions: for each rank of this process, how many versions of a stage's parameters existed at once
            in the last run.
        peak_weight_bytes: for each rank, of its parameters that want a gradient, in all versions.

    Raises:
        InputError: one of these does not fit.
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
    ) -> None:
        schedule = pipeline.schedule
        if schedule.microbatches_per_update is None:
            raise InputError(
                f"a Stream of schedule {schedule.name!r}, which flushes: it trains by Pipeline.step(); take a schedule "
                "with weight versions, such as pipedream"
            )
        if on_update is not None and not callable(on_update):
            raise InputError(f"on_update is {on_update!r}: it is called with a batch and its loss; pass a function")
        self._pipeline = pipeline
        self._options = UpdateOptions(
            max_norm=max_norm,
            learning_rate=learning_rate,
            discount=discount,
            discount_updates=discount_updates,
            scale_by_replicas=scale_by_replicas,
        )
        self._optimizer = StreamOptimizer(optimizer, self._options, pipeline)
        self._on_update = on_update
        self._microbatches = schedule.microbatches_per_update
        self._last_length: tuple[Program, Mapping[tuple[int, int], int]] | None = None
        self.num_batches = num_batches
        self.num_updates: dict[int, dict[int, int]] = {}
        self.peak_weight_versions: dict[int, int] = {}
        self.peak_weight_bytes: dict[int, int] = {}

    @property
    def num_batches(self) -> int:
        """How many batches have been run, in runs that came to their end; to go on from elsewhere, set it."""
        return self._num_batches

    @num_batches.setter
    def num_batches(self, count: int) -> None:
        count = _whole(count)
        if count < 0:
            raise InputError(f"num_batches is {count}: so many batches were run before; pass 0 or more")
        check_drained(self._pipeline.schedule, count, f"num_batches is {count}")
        self._num_batches = count

    def run(self, batches: Iterable[Any] | None, num_batches: int | None = None) -> list[StreamUpdate]:
        """Train on `batches`: start up, stream, drain. Every rank calls it alike.

        Afterwards all updates are made, nothing is in flight, and the modules hold the parameters that the optimizer
        knows. A parameter's memory may be another than before: take what ``.data``, ``detach()`` or `state_dict` gave
        anew.

        Args:
            batches: ``(inputs, targets)`` of each batch, samples along dimension 0. Taken one by one, as they are due;
                read on ranks with the first and the last stage, where inputs or targets may be None if not needed.
                Other ranks may pass None with `num_batches`.
            num_batches: how many to take; all, if `batches` has a length.

        Returns:
            What became of every batch, on every rank.

        Raises:
            InputError: no whole number of updates on every stage, gradients left from before, ranks that ask for
                different things; before any communication.
            CallerError: `batches`, `learning_rate` or `on_update` raised, or gave something wrong.
            RunError: a loss or a gradient is not finite, the optimizer has one state for several stages, or a rank did
                not get what it waits for (PeerLost).
            StageError: a stage, the loss or the optimizer raised. The parameters are back in their places, with the
                values of the updates that were made.
        """
        count = self._count(batches, num_batches if num_batches is None else _whole(num_batches))
        self._check_length(batches, count)
        executor = self._pipeline.executor
        executor.check_free()
        rates = self._check_ready()
        program, used = self._prepared(count)
        taken = StreamBatches(batches, count, program.schedule, executor.local_ranks)
        live = self._agree(count, rates)
        call = call_number(executor.num_calls + 1, True)
        plan = StreamPlan(program, used, call, self.num_batches)
        connection = executor.connection
        exchange = ResultExchange(connection.rank, program.schedule, connection.transport)
        results = StreamResults(connection.rank, exchange, plan, self._on_update, live)
        ranks = {
            rank: StreamRank(
                worker, plan, taken, self._optimizer, self._pipeline.state.ownership, results.add, results.poll
            )
            for rank, worker in executor.workers.items()
        }
        updates: list[StreamUpdate] = []

        def finish() -> None:
            taken.finish()
            norms = {rank: part.norms for rank, part in ranks.items()}
            updates.extend(results.gather(norms, connection.sum_over_processes))

        records = {rank: part.records.copy for rank, part in ranks.items()}  # that keeps nothing else alive
        self._optimizer.begin()
        try:
            executor.drive({rank: part.run() for rank, part in ranks.items()}, finish, records)
        finally:
            self._optimizer.end()
            self.num_updates = {
                rank: {s: sum(made == s for made, _ in part.norms) for s in executor.workers[rank].stages}
                for rank, part in ranks.items()
            }
        self.num_batches += count
        self.peak_weight_versions = {rank: part.peak_weight_versions for rank, part in ranks.items()}
        self.peak_weight_bytes = {rank: part.peak_weight_bytes for rank, part in ranks.items()}
        return updates

    def _count(self, batches: Iterable[Any] | None, num_batches: int | None) -> int:
        if num_batches is None:
            length = length_of(batches)
            if length is None:
                raise InputError(
                    f"batches are a {type(batches).__name__} without a length: a run has to know where it drains; pass "
                    "num_batches"
                )
            num_batches = length
        if num_batches < 1:
            raise InputError(f"a run of {num_batches} batches: it has at least 1; leave the call out")
        reads = self._pipeline.needs_inputs or self._pipeline.needs_targets
        if reads and not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise InputError(
                f"batches are a {type(batches).__name__}: ranks with the first or the last stage take pairs (inputs, "
                "targets) from them; pass an iterable"
            )
        return num_batches

    def _check_length(self, batches: Iterable[Any] | None, count: int) -> None:
        length, pipeline = length_of(batches), self._pipeline
        if length is not None and length < count and (pipeline.needs_inputs or pipeline.needs_targets):
            raise InputError(
                f"batches are {length} and num_batches is {count}: a run takes as many as it was told; give more, or "
                "pass a smaller num_batches"
            )

    def _check_ready(self) -> list[float] | None:
        """Refuse what cannot run; returns the learning rates that are asked for the first batch."""
        pipeline = self._pipeline
        self._optimizer.check()
        rates = self._optimizer.asked_rates(self.num_batches)
        if pipeline.executor.loss_fn is None:
            raise InputError("run() on a Pipeline without loss_fn: updates need a loss; pass loss_fn to Pipeline")
        if not torch.is_grad_enabled():
            raise InputError("run() where gradients are switched off: it computes them; leave torch.no_grad() first")
        for name, parameter in pipeline.named_parameters():
            if parameter.grad is not None:
                raise InputError(
                    f"parameter {name!r} has a gradient: a stream makes its own and updates by them; call "
                    "optimizer.zero_grad() before"
                )
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise InputError(
                    f"parameter {name!r} has a hook behind the accumulation of its gradient: here gradients accumulate "
                    "on versions of it; remove the hook"
                )
        pipeline.state.check_equal()
        return rates

    def program(self, num_batches: int) -> Program:
        """What `run` runs for so many batches."""
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
        """Make sure that all processes ask for the same; returns whether rank 0 wants losses as they come."""
        options = self._options
        own = {
            "batches": count,
            "batches before": self.num_batches,
            "max_norm": options.max_norm,
            "discount": options.discount,
            "discount_updates": options.discount_updates,
            "scale_by_replicas": options.scale_by_replicas,
        }
        rules = {rank: self._optimizer.rules(rank, rates) for rank in self._pipeline.executor.local_ranks}
        return agree(self._pipeline, own, rules, self._on_update is not None)


def _whole(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InputError(f"num_batches is {value!r}: it counts batches; pass a whole number")
