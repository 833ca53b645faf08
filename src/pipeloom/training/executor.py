"""`Executor`: the ranks of this process, which run programs on the stages they hold, and what their last run was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from pipeloom.engine.binders.activation_offload import ActivationMover
from pipeloom.engine.driver import Driver
from pipeloom.engine.instructions import Record
from pipeloom.engine.lowered_programs import Programs
from pipeloom.engine.rank_state import Batch, LossFn
from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.engine.speculation import Speculation
from pipeloom.engine.stores.gradient_sum import GradientSum
from pipeloom.engine.stores.parameter_store import Sharing
from pipeloom.engine.worker import Bound, Worker
from pipeloom.ir import Action, Program
from pipeloom.ir.recompute import Recompute
from pipeloom.processes.host_memory import give_back_freed_memory, keep_freed_memory
from pipeloom.split import Stages
from pipeloom.training.model_state import ModelState
from pipeloom.transport.call_numbers import call_count, call_number
from pipeloom.transport.connect import Connection
from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing, program_channels


class Executor(ModelState):
    """Runs programs, call after call, on all ranks of this process.

    Args:
        cut_model: all stages.
        programs: that will run.
        connection: to the other ranks; closed in the end.
        sharing: what copies of the pipeline share.
        loss_fn: of one micro-batch; None where no loss is asked for.
        sliced: whether micro-batches run in slices, be it one.
        recompute: what backwards compute again, one a stage of the model.
        open_mover: makes what moves the activations of one rank away and back, if somebody does.
        blackbox: a buffer for the label of the running action.

    Attributes:
        rank: of this process; None where it holds all ranks.
        local_ranks: the ranks of this process.
        process_group, transport: of the connection.
        workers: by rank of this process.
        driver: runs them together.
        last_run: for each rank of this process, what gives the records of its last run.
    """

    def __init__(
        self,
        cut_model: Stages,
        programs: Programs,
        connection: Connection,
        sharing: Sharing,
        *,
        loss_fn: LossFn | None,
        sliced: bool,
        recompute: Sequence[Recompute],
        open_mover: Callable[[], ActivationMover | None],
        blackbox: Any,
    ) -> None:
        self._programs, self._connection = programs, connection
        self.rank, self.process_group, self.transport = connection.rank, connection.process_group, connection.transport
        if self.rank is not None:
            frees = sharing.axis is not None and sharing.axis.shards_parameters
            give_back_freed_memory() if frees else keep_freed_memory()
        self.local_ranks: tuple[int, ...] = tuple(range(self.num_ranks)) if self.rank is None else (self.rank,)
        super().__init__(cut_model, programs.train, self.local_ranks, sharing)
        self._results = ResultExchange(self.rank, programs.forward.schedule, self.transport)
        # In an order that every rank agrees on.
        self.transport.open(sorted({*program_channels(programs.train), *self._results.channels()}))

        self.workers = {
            rank: Worker(
                rank,
                stages,
                loss_fn=sharing.loss_fn(loss_fn),
                transport=self.transport,
                gradient_sum=GradientSum(
                    rank,
                    self.ownership.shared(rank),
                    self.ownership.shared_buffers(rank),
                    self.transport,
                    self.stores[rank].value,
                ),
                store=self.stores[rank],
                sliced=sliced,
                recompute=recompute,
                mover=open_mover(),
                blackbox=blackbox,
            )
            for rank, stages in self._by_rank.items()
        }
        self._bound: dict[tuple[int, bool], Bound] = {}
        self.last_run: dict[int, Callable[[], Iterable[Record]]] = {}
        self._has_update_channels = False
        self._speculation: Speculation | None = None  # while parameters wait to be validated
        self.driver = Driver(self.rank, self.num_ranks, self.transport, sharing.leave)

    @property
    def program(self) -> Program:
        """What `step` runs."""
        return self._programs.train

    @property
    def num_ranks(self) -> int:
        return self.program.schedule.num_ranks

    # Runs

    def _run(self, program: Program, batch: Batch, *, with_loss: bool, share: bool = True) -> None:
        """Run `program` on `batch`, which then has the losses, or, not `with_loss`, the outputs.

        Args:
            share: whether ranks wait for those of others, where they want them.
        """
        bound = {rank: self._bind(rank, program) for rank in self.local_ranks}
        speculation = self._speculation
        if speculation is not None and (program.schedule.forward_only or not self.transport.blocking):
            self.settle()  # an evaluation is not done twice, and ranks that take turns have nothing to win
            speculation = None
        self._speculation = None
        self.driver.num_calls += 1
        call = call_number(self.driver.num_calls, not program.schedule.forward_only, batch.num_samples)
        runs = {rank: self.workers[rank].run(bound[rank], batch, call, speculation) for rank in self.local_ranks}
        self.last_run = {rank: bound[rank].records for rank in self.local_ranks}

        def finish() -> None:
            if share:
                self._results.share(batch.losses if with_loss else batch.outputs, everywhere=with_loss)

        self.driver.run(runs, finish)
        self.driver.num_calls = call_count(self.workers[self.local_ranks[0]].state.call)

    def _bind(self, rank: int, program: Program) -> Bound:
        key = (rank, program.schedule.forward_only)
        if key not in self._bound:
            self._bound[key] = self.workers[rank].bind(program)
        return self._bound[key]

    # Updates that are validated later

    def neighbours(self, rank: int) -> dict[int, tuple[Outgoing, Incoming]]:
        """The channels of updates between a rank of this process and the ranks before and behind it, by their number.

        The first call opens them, on all ranks.
        """
        pairs = [(a, b) for low in range(self.num_ranks - 1) for a, b in ((low, low + 1), (low + 1, low))]
        if not self._has_update_channels:
            self.transport.open([Channel(a, b, Lane.UPDATE) for a, b in pairs])
            self._has_update_channels = True
        return {
            peer: (
                self.transport.outgoing(Channel(rank, peer, Lane.UPDATE)),
                self.transport.incoming(Channel(peer, rank, Lane.UPDATE)),
            )
            for source, peer in pairs
            if source == rank
        }

    def speculate(self, speculation: Speculation) -> None:
        """The parameters may be wrong: `speculation` is asked in the next training run, or before anything else."""
        self._speculation = speculation

    def settle(self) -> None:
        """Make sure that the parameters are the right ones. Every rank calls it, as `step`; free where they are."""
        speculation, self._speculation = self._speculation, None
        if speculation is not None:
            with self.driver.ended_by_errors():
                for rank in reversed(self.local_ranks):  # the last rank knows first
                    speculation.validate(rank)
                self.transport.end_step()

    # The last run

    @property
    def records(self) -> list[tuple[int, list[Record]]]:
        """For each rank of this process, the actions of the last run with start and end (perf_counter seconds).

        Gathers, reductions over copies and moves come last, with the times in which they were under way: one record for
        each of a stage's units.
        """
        return [(rank, list(records())) for rank, records in self.last_run.items()]

    @property
    def waits(self) -> dict[int, dict[Action, float]]:
        """For each rank of this process, the seconds that actions of the last run waited inside for what ran beside
        them: parameters to be gathered, gradients to be reduced, activations to come back."""
        return {rank: worker.beside.waits for rank, worker in self.workers.items()}

    @property
    def peak_live_activations(self) -> dict[int, int]:
        """For each rank of this process, the most activations held at once in the last run."""
        return {rank: worker.peak_live_activations for rank, worker in self.workers.items()}

    @property
    def live_activations(self) -> dict[int, int]:
        """For each rank of this process, the activations held now; zero between steps."""
        return {rank: worker.live_activations for rank, worker in self.workers.items()}

    @property
    def offloaded(self) -> tuple[int, float]:
        """Bytes of activations and main parameters that were moved by ranks of this process, and seconds they waited.

        What an optimizer moves of parameters counts too; how long it waits it says itself.
        """
        movers = [worker.state.mover for worker in self.workers.values() if worker.state.mover is not None]
        parameters = self.parameters_away
        moved = sum(mover.moved_bytes for mover in movers) + parameters.moved_bytes
        return moved, sum(mover.wait_seconds for mover in movers) + parameters.wait_seconds

    def close(self) -> None:
        """Close the channels. Closing twice does nothing.

        The parameters stay usable, but those under zero3: these are whole in `state_dict` alone, which still works.
        """
        self.driver.close()
        for store in self.stores.values():
            store.close()
        for worker in self.workers.values():
            if worker.state.mover is not None:
                worker.state.mover.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.driver.ended is None:
            self.settle()
        self.close()
