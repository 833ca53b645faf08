"""Losses and gradient norms of a stream's run: on every rank at its end, losses on rank 0 as they come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeloom.errors import CallerError, one_line
from pipeloom.ir.versions import num_updates
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.training.stream.rank_run import StreamPlan
from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing, Transport
from pipeloom.transport.values import flatten

OnUpdate = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """What became of one batch.

    Attributes:
        batch: its number, counted over all runs.
        loss: the mean over its samples, each micro-batch by the parameters that it met.
        grad_norm: the 2-norm over all stages of the gradients of their updates which hold this batch, before clipping.
    """

    batch: int
    loss: float
    grad_norm: float


class StreamResults:
    """One process's part in collecting the results of one run.

    Args:
        rank: of this process; None where it holds all ranks.
        transport: with the lane of results open.
        group: of all processes; None where there is one.
        plan: of the run.
        on_update: called with every batch and its loss, in order, on the process with rank 0.
        live: whether ranks with the last stage send losses to rank 0 at once.
    """

    def __init__(
        self,
        rank: int | None,
        transport: Transport,
        group: dist.ProcessGroup | None,
        plan: StreamPlan,
        on_update: OnUpdate | None,
        live: bool,
    ) -> None:
        schedule = plan.program.schedule
        self._plan, self._group, self._on_update = plan, group, on_update if rank in (None, 0) else None
        self._num_batches = schedule.num_microbatches // plan.batch_size
        self._own: dict[int, float] = {}  # losses that were computed here
        self._untold: dict[int, float] = {}  # losses of batches that are not complete
        self._num_told = 0
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._incoming: list[Incoming] = []
        self._outgoing: Outgoing | None = None
        holders = schedule.placement.replicas[-1]
        if live and rank == 0:
            self._incoming = [transport.incoming(Channel(peer, 0, Lane.RESULT)) for peer in holders if peer != 0]
        elif live and rank is not None and rank in holders:
            self._outgoing = transport.outgoing(Channel(rank, 0, Lane.RESULT))
        self._num_due = [num_updates(schedule, schedule.num_stages - 1)] * len(self._incoming)

    def add(self, losses: dict[int, float]) -> None:
        """Take the losses of micro-batches that ran here, each times its share of its batch."""
        if self._outgoing is not None:
            rows = torch.tensor(list(losses.items()), dtype=torch.float64)
            self._outgoing.send(*flatten(rows), self._plan.call)
        with self._lock:
            self._own.update(losses)
            self._tell(losses)

    def poll(self) -> None:
        """Take what other ranks sent so far."""
        for which, end in enumerate(self._incoming):
            while self._num_due[which] and end.ready():
                self._take(which)

    def _take(self, which: int) -> None:
        (rows,) = self._incoming[which].receive().tensors
        self._num_due[which] -= 1
        self._tell({int(microbatch): loss for microbatch, loss in rows.tolist()})

    def _tell(self, losses: dict[int, float]) -> None:
        """Tell of the batches that are complete with these."""
        if self._on_update is None:
            return
        self._untold.update(losses)
        while self._untold.keys() >= (held := self._microbatches_of(self._num_told)):
            batch = self._plan.batches_before + self._num_told
            loss = sum(self._untold.pop(b) for b in sorted(held))
            try:
                self._on_update(batch, loss)
            except Exception as error:
                raise CallerError(
                    f"on_update({batch}, {loss}) raised {one_line(error)}: the run ends with it; correct it, or leave "
                    "it out"
                ) from error
            self._num_told += 1

    def _microbatches_of(self, batch: int) -> set[int]:
        return set(range(batch * self._plan.batch_size, (batch + 1) * self._plan.batch_size))

    def gather(self, norms: Mapping[int, Mapping[tuple[int, int], float]]) -> list[StreamUpdate]:
        """All results, on every process.

        Args:
            norms: for each rank of this process, by stage and update.
        """
        for which in range(len(self._incoming)):
            while self._num_due[which]:
                self._take(which)
        schedule, size = self._plan.program.schedule, self._plan.batch_size
        squares = torch.zeros(self._num_batches, schedule.num_stages, dtype=torch.float64)
        for rank, of_rank in norms.items():
            for (stage, update), norm in of_rank.items():
                if schedule.placement.replicas[stage][0] == rank:  # replicas have the same
                    held = self._plan.microbatches_of(stage, update)
                    squares[held.start // size : held.stop // size, stage] = norm**2
        losses = torch.tensor([self._own.get(b, 0.0) for b in range(schedule.num_microbatches)], dtype=torch.float64)
        table = torch.cat([losses.view(-1, size), squares], 1)  # of every batch: its losses, squares of norms
        if self._group is not None:
            with noticing_lost_peers("another rank ended before all had the results of the run; see what it said"):
                dist.all_reduce(table, group=self._group)
        first = self._plan.batches_before
        return [
            StreamUpdate(first + number, sum(row[:size]), math.sqrt(sum(row[size:])))
            for number, row in enumerate(table.tolist())
        ]
