"""`Executor`: runs programs on the ranks of one process, call after call, until the first error."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pipeloom.engine.activation_mover import ActivationMover
from pipeloom.engine.instructions import Record, Run
from pipeloom.engine.lowered_programs import Programs
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.rank_state import Batch, LossFn
from pipeloom.engine.rank_threads import RankThreads
from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.engine.stores.gradient_sum import GradientSum
from pipeloom.engine.worker import Bound, WarmUp, Worker
from pipeloom.errors import InputError, RunError
from pipeloom.ir import Action, Program
from pipeloom.ir.recompute import Recompute
from pipeloom.transport.connect import Connection
from pipeloom.transport.interface import Channel, OneProcessTransport, call_count, call_number, program_channels


class Executor:
    """Runs all ranks of the process in one thread, or in one thread per rank where the transport blocks.

    `Pipeline` calls `run`. `Stream` and post-validation, which do not run one program after another, use `drive`,
    `workers`, `open_channels`, `before_call` and `ended_by_errors`.

    Args:
        state: the stages and parameters of this process.
        programs: the programs to run.
        connection: to the other ranks; closed at the end.
        loss_fn: loss of one micro-batch; None: no loss is computed.
        sliced: whether micro-batches run in slices, even if in one.
        recompute: what backwards recompute, per stage of the model.
        open_mover: makes the mover of one rank's activations; returns None without activation offload.
        blackbox: a writable buffer for the label of the running action.

    Attributes:
        programs, connection: as given.
        loss_fn: as given.
        local_ranks: the ranks of this process.
        workers: by rank of this process.
        num_calls: calls so far, equal on all ranks.
        before_call: called once before the next call or by `settle`, to finish work of the last call.
        last_run: per rank of this process, a function that returns the records of its last run.
        ended: why nothing can run any more; None while the executor can run.
    """

    def __init__(
        self,
        state: ModelState,
        programs: Programs,
        connection: Connection,
        *,
        loss_fn: LossFn | None,
        sliced: bool,
        recompute: Sequence[Recompute],
        open_mover: Callable[[], ActivationMover | None],
        blackbox: Any,
    ) -> None:
        self.programs, self.connection, self.loss_fn = programs, connection, loss_fn
        self.local_ranks = tuple(state.stages_of)
        self._state, self._transport = state, connection.transport
        self._results = ResultExchange(connection.rank, programs.forward.schedule, self._transport)
        self._opened: set[Channel] = set()
        self.open_channels({*program_channels(programs.train), *self._results.channels()})
        self.workers = {
            rank: Worker(
                rank,
                stages,
                loss_fn=state.sharing.loss_fn(loss_fn),
                transport=self._transport,
                gradient_sum=GradientSum(
                    rank,
                    state.ownership.shared(rank),
                    state.ownership.shared_buffers(rank),
                    self._transport,
                    state.stores[rank].value,
                ),
                store=state.stores[rank],
                sliced=sliced,
                recompute=recompute,
                mover=open_mover(),
                blackbox=blackbox,
            )
            for rank, stages in state.stages_of.items()
        }
        self._bound: dict[tuple[int, bool], Bound] = {}
        self._threads: RankThreads | None = None
        if isinstance(self._transport, OneProcessTransport) and self._transport.blocking and len(self.local_ranks) > 1:
            self._threads = RankThreads(len(self.local_ranks), self._transport)
        self._running = False
        self.num_calls = 0
        self.before_call: Callable[[], None] | None = None
        self.last_run: Mapping[int, Callable[[], Iterable[Record]]] = {}
        self.ended: str | None = None

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Open the channels that are not open yet. Every rank calls it with the same channels."""
        new = sorted(set(channels) - self._opened)  # in an order that every rank agrees on
        self._transport.open(new)
        self._opened.update(new)

    def check_free(self) -> None:
        """Raises RunError after the end, InputError in the middle of a call."""
        if self.ended is not None:
            raise RunError(f"this Pipeline cannot run any more ({self.ended}). Make a new one.")
        if self._running:
            raise InputError(
                "a stage or the loss called its own Pipeline: a Pipeline runs one call at a time. Call it before or "
                "after."
            )

    # Runs

    def run(
        self,
        program: Program,
        batch: Batch,
        *,
        with_loss: bool,
        share_results: bool = True,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Run `program` on `batch`, which receives the losses, or, not `with_loss`, the outputs.

        Args:
            share_results: whether ranks wait for the losses or outputs of other ranks.
            warm_up: runs the first instructions of each rank, in place of `before_call`. Ignored where one thread runs
                all ranks.
        """
        if warm_up is None or not self._transport.blocking:
            warm_up = None
            self.settle()
        self.before_call = None
        bound = {rank: self._bind(rank, program) for rank in self.local_ranks}
        call = call_number(self.num_calls + 1, not program.schedule.forward_only, batch.num_samples)
        runs = {rank: self.workers[rank].run(bound[rank], batch, call, warm_up) for rank in self.local_ranks}

        def finish() -> None:
            if share_results:
                self._results.share(batch.losses if with_loss else batch.outputs, everywhere=with_loss)

        self.drive(runs, finish, {rank: bound[rank].records for rank in self.local_ranks})
        self.num_calls = call_count(self.workers[self.local_ranks[0]].state.call)  # a warm-up may have taken a number

    def _bind(self, rank: int, program: Program) -> Bound:
        key = (rank, program.schedule.forward_only)
        if key not in self._bound:
            self._bound[key] = self.workers[rank].bind(program)
        return self._bound[key]

    def drive(
        self,
        runs: Mapping[int, Run],
        finish: Callable[[], None],
        records: Mapping[int, Callable[[], Iterable[Record]]],
    ) -> None:
        """Run every rank of this process to its end, then `finish`, as one call of the pipeline.

        Args:
            runs: one per rank.
            finish: called once all ranks have ended.
            records: per rank, a function that returns the records of this run.
        """
        self.num_calls += 1
        self.last_run = records
        self._running = True
        with self.ended_by_errors(runs.values()):
            if self._threads is not None:
                self._threads.run(runs)
            else:
                _take_turns(list(runs.values()))
            finish()
            self._transport.end_step()

    def settle(self) -> None:
        """Finish the work that the last call left. Every rank calls it."""
        before, self.before_call = self.before_call, None
        if before is not None:
            before()

    @contextmanager
    def ended_by_errors(self, runs: Iterable[Run] = ()) -> Generator[None]:
        """An error inside the block ends the executor, since ranks are out of step afterwards."""
        try:
            yield
        except BaseException as error:
            self._end(f"it failed: {type(error).__name__}: {error}", runs)
            self._state.sharing.leave()
            raise
        finally:
            self._running = False

    def _end(self, reason: str, runs: Iterable[Run] = ()) -> None:
        self.ended = self.ended or reason
        for run in runs:  # ranks that were waiting release their values
            with suppress(Exception):  # an error here would hide the first one
                run.close()
        if self._threads is not None:
            self._threads.close()
        self._transport.close()

    def close(self) -> None:
        """Close channels, threads and files. Closing twice does nothing."""
        self._end("it was closed")
        for store in self._state.stores.values():
            store.close()
        for worker in self.workers.values():
            if worker.state.wiring.mover is not None:
                worker.state.wiring.mover.close()
        self.connection.close()

    # The last run

    def records(self) -> list[tuple[int, list[Record]]]:
        """Per rank of this process, the actions of the last run with start and end (perf_counter seconds)."""
        return [(rank, list(records())) for rank, records in self.last_run.items()]

    def waits(self) -> dict[int, dict[Action, float]]:
        """Per rank of this process, the seconds that each action of the last run waited for overlapped work."""
        return {rank: worker.overlap.waits for rank, worker in self.workers.items()}


def _take_turns(runs: list[Run]) -> None:
    """Run all ranks in this thread: each runs until it has to wait for another."""
    while runs:
        runs = [run for run in runs if next(run, runs) is not runs]
