"""`StreamRun`: one run of a stream on the ranks of this process, from its first batch to its results."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.ir import Program
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stream.batches import StreamBatches
from pipeloom.training.stream.observed import StreamObservations
from pipeloom.training.stream.results import OnUpdate, StreamResults, StreamUpdate
from pipeloom.training.stream.stream_optimizer import StreamOptimizer
from pipeloom.training.stream.stream_rank import StopBefore, StreamPlan, StreamRank


class StreamRun:
    """One run of a `Stream`.

    Args:
        pipeline: whose ranks run.
        plan: of the run; the same on all ranks.
        batches, optimizer: of this process.
        on_update, stop_before: as of `Stream`.
        live: whether ranks with the last stage send losses to rank 0 during the run.
        program_of: returns the program of a run of fewer batches, for a run that is stopped early.

    Attributes:
        ranks: the ranks of this process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: StreamPlan,
        batches: StreamBatches,
        optimizer: StreamOptimizer,
        *,
        on_update: OnUpdate | None,
        live: bool,
        stop_before: StopBefore | None,
        program_of: Callable[[int], Program],
    ) -> None:
        self._pipeline, self._plan, self._batches, self._optimizer = pipeline, plan, batches, optimizer
        self._program_of = program_of
        connection = pipeline.executor.connection
        exchange = ResultExchange(connection.rank, plan.program.schedule, connection.transport)
        self._results = StreamResults(connection.rank, exchange, plan, on_update, live)
        self._observed = StreamObservations(pipeline.observed, batches.batch.declared, plan.batch_size)
        self.ranks = {
            rank: StreamRank(
                worker,
                plan,
                batches,
                optimizer,
                pipeline.state.ownership,
                self._observed,
                self._results.add,
                self._results.receive,
                stop_before,
            )
            for rank, worker in pipeline.executor.workers.items()
        }

    def run(self) -> list[StreamUpdate]:
        """Run all ranks of this process to their end; returns the results of all batches that ran."""
        updates: list[StreamUpdate] = []
        if self._pipeline.mesh is not None:
            self._pipeline.mesh.meter.begin()
        runs = {rank: part.run() for rank, part in self.ranks.items()}
        records = {rank: part.records.copy for rank, part in self.ranks.items()}  # keeps nothing else alive
        self._optimizer.begin()
        try:
            self._pipeline.executor.drive(runs, lambda: updates.extend(self._gather()), records)
        finally:
            self._optimizer.end()
        return updates

    def _gather(self) -> list[StreamUpdate]:
        """The results, on every process."""
        made = self._plan.program.num_microbatches // self._plan.batch_size
        stopped = next(iter(self.ranks.values())).stopped_before
        if stopped is not None:
            made = stopped
            self._results.shorten(replace(self._plan, program=self._program_of(stopped)))
        self._batches.finish(made)
        norms = {rank: part.norms for rank, part in self.ranks.items()}
        found = self._observed.gather(made, self._batches.num_samples, self._sum_over_pipelines)
        return self._results.gather(norms, found, self._sum_over_pipelines)

    def _sum_over_pipelines(self, table: Tensor) -> Tensor:
        """The sum over all processes; of those that share a stage, with the same results, the first alone counts."""
        counts = self._pipeline.state.sharing.blocks.leads
        connection = self._pipeline.executor.connection
        return connection.sum_over_processes(table if counts else torch.zeros_like(table))

    def num_updates(self) -> dict[int, dict[int, int]]:
        """By rank of this process and stage, the number of updates so far."""
        workers = self._pipeline.executor.workers
        return {
            rank: {stage: sum(made == stage for made, _ in part.norms) for stage in workers[rank].stages}
            for rank, part in self.ranks.items()
        }
