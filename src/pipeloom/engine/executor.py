"""`Executor`: runs programs on the ranks of one process, call after call, until the first error."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from pipeloom.devices import Device, device_of_modules
from pipeloom.engine.activation_mover import ActivationMover
from pipeloom.engine.batch import Batch
from pipeloom.engine.binders.action_graphs import ActionGraphs
from pipeloom.engine.calls.agreement import number_of_forms
from pipeloom.engine.calls.intake import BatchIntake
from pipeloom.engine.calls.reader import Batching, Programs
from pipeloom.engine.calls.refusals import PeerRefused, refused_by, send_refusals
from pipeloom.engine.elsewhere import Elsewhere
from pipeloom.engine.instructions import Run
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.pair_streams import stages_of_second_stream
from pipeloom.engine.rank_state import RankWiring, Record
from pipeloom.engine.rank_threads import RankThreads
from pipeloom.engine.result_exchange import ResultExchange
from pipeloom.engine.stores.gradient_sum import GradientSum
from pipeloom.engine.worker import Bound, WarmUp, Worker, WrapStep
from pipeloom.errors import InputError, RunError
from pipeloom.ir import Program, Skip
from pipeloom.ir.recompute import Recompute
from pipeloom.transport.call_numbers import Call, call_count, call_number
from pipeloom.transport.connect import Connection
from pipeloom.transport.interface import Channel, OneProcessTransport, program_channels
from pipeloom.transport.values import Value

# What one rank runs in a call, in place of its program.
RankRun = Callable[[Worker, Bound, Batch, int], Run]


class Executor:
    """Runs all ranks of the process in one thread, or in one thread per rank where the transport blocks.

    `Pipeline` calls `run`. `Stream` and post-validation, which do not run one program after another, use `drive`,
    `workers`, `open_channels`, `before_call` and `ended_by_errors`.

    Args:
        state: the stages and parameters of this process.
        programs: the programs to run.
        connection: to the other ranks; closed at the end.
        batching: how batches become micro-batches, with their loss.
        recompute: what backwards recompute, per stage of the model.
        open_mover: makes the mover of one rank's activations; returns None without activation offload.
        blackbox: a writable buffer for the label of the running action.
        skips: by pair of stages, the names of the values that skip stages between them.
        graphs: whether the actions of steps are recorded as CUDA graphs.
        elsewhere: see `parameters_elsewhere`; outputs of stages must not follow from these.

    Attributes:
        programs, connection, batching: as given.
        local_ranks, workers: the ranks of this process, and a worker for each.
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
        batching: Batching,
        *,
        recompute: Sequence[Recompute],
        open_mover: Callable[[], ActivationMover | None],
        blackbox: Any,
        skips: Mapping[Skip, tuple[str, ...]],
        graphs: bool = False,
        elsewhere: Elsewhere,
    ) -> None:
        self.programs, self.connection, self.batching = programs, connection, batching
        self.local_ranks = tuple(state.stages_of)
        self._state, self._transport = state, connection.transport
        self._results = ResultExchange(connection.rank, programs.forward.schedule, self._transport)
        devices = {rank: device_of_modules(rank, stages) for rank, stages in state.stages_of.items()}
        if isinstance(self._transport, OneProcessTransport):
            self._transport.place(devices)
        self._graphs = self._open_graphs(devices) if graphs else None
        self._opened: set[Channel] = set()
        self.open_channels({*program_channels(programs.train), *self._results.channels()})
        self.workers: dict[int, Worker] = {}
        for rank, stages in state.stages_of.items():
            wiring = RankWiring(
                rank=rank,
                stages=stages,
                loss_fn=state.sharing.loss_fn(batching.loss_fn),
                transport=self._transport,
                sliced=batching.sliced,
                parts=batching.parts,
                recompute=recompute,
                mover=open_mover(),
                skips=skips,
                device=devices[rank],
                elsewhere=elsewhere,
                second=stages_of_second_stream(programs.train, rank) if devices[rank].is_asynchronous else frozenset(),
            )
            self.workers[rank] = self._worker(wiring, blackbox)
        self._intake = BatchIntake(devices, state, programs, connection, batching)
        self.open_channels(self._intake.channels)
        # By number of micro-batches and whether there are only forwards, then by rank.
        self._bound: dict[tuple[int, bool], dict[int, Bound]] = {}
        self._wrap: WrapStep | None = None
        self._threads: RankThreads | None = None
        if isinstance(self._transport, OneProcessTransport) and self._transport.blocking and len(self.local_ranks) > 1:
            self._threads = RankThreads(devices, self._transport)
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
        read: Callable[[], tuple[Value, Value]],
        *,
        training: bool,
        with_loss: bool,
        share_results: bool = True,
        warm_up: WarmUp | None = None,
        run_rank: RankRun | None = None,
        channels: Iterable[Channel] = (),
        settings: str = "",
    ) -> Batch:
        """Run a program on a batch; returns its micro-batches with their losses or, not `with_loss`, outputs.

        Args:
            read: returns inputs and targets of the batch, read on ranks with the first stage, the last stage.
            training: whether the training program runs.
            share_results: whether ranks wait for the losses or outputs of other ranks.
            warm_up: runs the first instructions of each rank, in place of `before_call`. Ignored where one thread runs
                all ranks.
            run_rank: what each rank runs in place of its program, once; None: the program.
            channels: what it needs beside those of the program, opened once all ranks are known to be in this call.
            settings: its arguments, which all ranks have to pass alike.

        Raises:
            InputError: a rank cannot use its batch. All ranks raise, and can make the next call.
        """
        self.check_free()
        kind = Call.STEP if training else Call.FORWARD if run_rank is None else Call.GENERATE
        batch = self._read(read, kind, with_loss=with_loss, settings=settings)
        self.open_channels(channels)
        batch.collects = with_loss
        program = self.programs.train if training else self.programs.forward_of(batch.num_microbatches)
        if warm_up is None or not self._transport.blocking or self._graphs is not None:
            warm_up = None
            self.settle()
        self.before_call = None
        bound = self._bound_to(program)
        call = call_number(self.num_calls + 1, kind, batch.num_samples, number_of_forms(batch.forms))
        if run_rank is None:
            runs = {rank: worker.run(bound[rank], batch, call, warm_up) for rank, worker in self.workers.items()}
        else:
            runs = {rank: run_rank(worker, bound[rank], batch, call) for rank, worker in self.workers.items()}

        def finish() -> None:
            if share_results:
                if not with_loss and len(self._results.holders) > 1:  # messages carry no parts of outputs
                    full = self._state.sharing.blocks.full_output
                    batch.outputs = {b: full(batch.outputs[b]) for b in sorted(batch.outputs)}
                results = batch.losses if with_loss else batch.outputs
                self._results.share(results, program.num_microbatches, everywhere=with_loss)

        try:
            with self._recording(batch, program) if training else nullcontext():
                self.drive(runs, finish, {rank: each.records for rank, each in bound.items()})
        except PeerRefused as refusal:
            self.num_calls -= 1
            raise InputError(self._refuse(str(refusal), batch.forms)) from None
        self.num_calls = call_count(self.workers[self.local_ranks[0]].state.call)  # a warm-up may have taken a number
        return batch

    def _worker(self, wiring: RankWiring, blackbox: Any) -> Worker:
        rank, sharing = wiring.rank, self._state.sharing
        shared, store = self._state.ownership.shared(rank), self._state.stores[rank]
        return Worker(
            wiring,
            gradient_sum=GradientSum(rank, shared, self._transport, store.value) if shared else None,
            block_sum=sharing.blocks.gradient_sum(store.parameters, store.ranges, store.gradient_dtype),
            store=store,
            graphs=self._graphs,
            blackbox=blackbox,
        )

    def _open_graphs(self, devices: Mapping[int, Device]) -> ActionGraphs:
        found = dict.fromkeys(devices.values())
        graphs = next(iter(found)).graphs()
        if graphs is None or len(found) > 1:
            names = ", ".join(str(device.device) for device in found)
            raise InputError(
                f"graphs=True: the ranks of this process compute on {names}: actions are recorded on one CUDA device. "
                "Move the model there, or use graphs=False."
            )
        return ActionGraphs(graphs, shares_memory=self.connection.rank is None)

    @contextmanager
    def _recording(self, batch: Batch, program: Program) -> Generator[None]:
        """Around a step: with graphs, it runs in a stream of its own, in which actions can be recorded."""
        if self._graphs is None:
            yield
            return
        worker = self.workers[self.local_ranks[0]]
        device = worker.state.wiring.device
        with self.ended_by_errors(), device.computing(after=device.mark()):
            try:
                self._graphs.begin(batch, program, worker.state.loss_scale)
                yield
                self._graphs.end()
            except BaseException:
                self._graphs.failed()
                raise
            done = device.mark()
        device.wait(done)

    def _bound_to(self, program: Program) -> dict[int, Bound]:
        key = program.num_microbatches, program.schedule.forward_only
        if key not in self._bound:
            self._bound[key] = {rank: worker.bind(program, self._wrap) for rank, worker in self.workers.items()}
        return self._bound[key]

    @contextmanager
    def wrapping(self, wrap: WrapStep) -> Generator[None]:
        """Inside the block, every step of an action is what `wrap` makes of it."""
        bound, self._bound, self._wrap = self._bound, {}, wrap
        try:
            yield
        finally:
            self._bound, self._wrap = bound, None

    def _read(
        self, read: Callable[[], tuple[Value, Value]], kind: Call, *, with_loss: bool, settings: str = ""
    ) -> Batch:
        """The micro-batches of this replica. Where a batch is invalid, all ranks of all replicas raise."""
        training = kind is Call.STEP
        try:
            with self._ended_by_lost_peers():
                batch = self._intake.read(read, kind, self.num_calls + 1, with_loss=with_loss, settings=settings)
            if self._graphs is not None and training:
                self._graphs.check(batch)
        except Exception as error:
            if training and self._intake.refuses_in_messages and self.connection.rank is not None:
                self._refuse(refused_by(self.connection.rank, error))
            raise
        return batch

    @contextmanager
    def _ended_by_lost_peers(self) -> Generator[None]:
        try:
            yield
        except RunError:
            with self.ended_by_errors():
                raise

    def _refuse(self, text: str, forms: tuple[str, str] = ("", "")) -> str:
        """End the next call on this rank, and tell its neighbours, which may run it; returns why.

        Args:
            text: why; empty: ranks have batches of different forms.
            forms: of the batch of this rank.
        """
        rank = self.local_ranks[0]
        channels = program_channels(self.programs.train)
        send_refusals(self._transport, channels, rank, call_number(self.num_calls + 1, Call.STEP), text)
        with self.ended_by_errors():
            self.settle()
            self._transport.end_step()
        self.num_calls += 2  # the second is that of a warm-up which was repeated
        self.workers[rank].state.last_refused = self.num_calls
        if not self._intake.exchanges_reasons:
            return text
        self.num_calls += 1
        with self.ended_by_errors():
            return self._intake.reason(text, forms, self.num_calls - 1)

    def drive(
        self, runs: Mapping[int, Run], finish: Callable[[], None], records: Mapping[int, Callable[[], Iterable[Record]]]
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
            else:  # each rank runs until it has to wait for another
                waiting = [*runs.values()]
                while waiting:
                    waiting = [run for run in waiting if next(run, waiting) is not waiting]
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
        except PeerRefused:
            close_runs(runs)
            raise
        except BaseException as error:
            self._end(f"it failed: {type(error).__name__}: {error}", runs)
            self._state.sharing.leave()
            raise
        finally:
            self._running = False

    def _end(self, reason: str, runs: Iterable[Run] = ()) -> None:
        self.ended = self.ended or reason
        close_runs(runs)
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


def close_runs(runs: Iterable[Run]) -> None:
    """Ranks that were waiting release their values."""
    for run in runs:
        with suppress(Exception):  # an error here would hide the first one
            run.close()
