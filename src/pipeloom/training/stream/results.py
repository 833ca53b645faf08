"""Losses and gradient norms of a stream's run: on every rank at its end; losses on rank 0 during the run too."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.errors import CallerError, one_line
from pipeloom.ir.versions import num_updates
from pipeloom.training.observations import AuxiliaryValue, Observed
from pipeloom.training.stream.stream_rank import StreamPlan

OnUpdate = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """The result of one batch.

    Attributes:
        batch: its index, counted over all runs.
        loss: the mean over its samples, each micro-batch with the parameters that it used.
        grad_norm: the 2-norm over all stages of the gradients of the updates with this batch, before clipping.
        auxiliary_losses: as of `Pipeline.auxiliary_losses`.
        observations: as of `Pipeline.observations`.
        metrics: as of `Pipeline.metrics`.
    """

    batch: int
    loss: float
    grad_norm: float
    auxiliary_losses: dict[str, dict[str, AuxiliaryValue]] = field(default_factory=dict, compare=False)
    observations: dict[str, dict[str, Tensor]] = field(default_factory=dict, compare=False)
    metrics: dict[str, float] = field(default_factory=dict, compare=False)


class StreamResults:
    """One process's part in collecting the results of one run.

    Args:
        rank: of this process; None where it holds all ranks.
        on_update: called with every batch and its loss, in order, on the process with rank 0.
        live: whether ranks with the last stage send losses to rank 0 during the run.
    """

    def __init__(
        self, rank: int | None, exchange: ResultExchange, plan: StreamPlan, on_update: OnUpdate | None, live: bool
    ) -> None:
        self._plan, self._exchange, self._on_update = plan, exchange, on_update if rank in (None, 0) else None
        self._own: dict[int, float] = {}  # losses computed in this process
        self._pending: dict[int, float] = {}  # losses of incomplete batches
        self._num_reported = 0
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._last_stage = plan.program.schedule.num_stages - 1
        self._sends = live and rank not in (None, 0) and rank in exchange.holders
        self._num_updates = num_updates(plan.program.schedule, self._last_stage)
        # For each rank that sends losses: the number of updates of the last stage received from it.
        self._num_received = {holder: 0 for holder in exchange.holders if live and rank == 0 and holder != 0}

    def shorten(self, plan: StreamPlan) -> None:
        """The run ended early, as `plan` says."""
        self._plan = plan
        self._num_updates = num_updates(plan.program.schedule, self._last_stage)

    def add(self, losses: dict[int, float]) -> None:
        """Add the losses of micro-batches that ran here, each times its share of its batch."""
        if self._sends:
            self._exchange.send({b: torch.tensor(loss, dtype=torch.float64) for b, loss in losses.items()}, [0])
        with self._lock:
            self._own.update(losses)
            self._report(losses)

    def receive(self, *, wait: bool = False) -> None:
        """Receive the losses that other ranks have sent so far, or with `wait` all of the run."""
        for holder in self._num_received:
            while self._num_received[holder] < self._num_updates and (wait or self._exchange.ready(holder)):
                held = self._plan.microbatches_of(self._last_stage, self._num_received[holder])
                self._num_received[holder] += 1
                self._report({b: float(loss) for b, loss in self._exchange.receive(holder, held).items()})

    def _report(self, losses: dict[int, float]) -> None:
        """Call `on_update` for the batches that these losses complete."""
        if self._on_update is None:
            return
        self._pending.update(losses)
        size = self._plan.batch_size
        while self._pending.keys() >= (held := {*range(self._num_reported * size, (self._num_reported + 1) * size)}):
            batch = self._plan.batches_before + self._num_reported
            loss = sum(self._pending.pop(b) for b in sorted(held))
            try:
                self._on_update(batch, loss)
            except Exception as error:
                raise CallerError(
                    f"on_update({batch}, {loss}) raised {one_line(error)}, which ends the run."
                ) from error
            self._num_reported += 1

    def gather(
        self,
        norms: Mapping[int, Mapping[tuple[int, int], float]],
        observed: Sequence[Observed],
        sum_over_processes: Callable[[Tensor], Tensor],
    ) -> list[StreamUpdate]:
        """All results, on every process.

        Args:
            norms: for each rank of this process, by stage and update.
            observed: of each batch, on every process.
            sum_over_processes: sums a table over all processes.
        """
        self.receive(wait=True)
        schedule, size = self._plan.program.schedule, self._plan.batch_size
        squares = torch.zeros(schedule.num_microbatches // size, schedule.num_stages, dtype=torch.float64)
        for rank, of_rank in norms.items():
            for (stage, update), norm in of_rank.items():
                if schedule.placement.replicas[stage][0] == rank:  # replicas have the same
                    held = self._plan.microbatches_of(stage, update)
                    squares[held.start // size : held.stop // size, stage] = norm**2
        losses = torch.tensor([self._own.get(b, 0.0) for b in range(schedule.num_microbatches)], dtype=torch.float64)
        # For every batch: its losses, then the squares of its norms.
        table = sum_over_processes(torch.cat([losses.view(-1, size), squares], 1))
        first = self._plan.batches_before
        return [
            StreamUpdate(first + number, sum(row[:size]), math.sqrt(sum(row[size:])), *observed[number])
            for number, row in enumerate(table.tolist())
        ]
