"""`Worker`: one rank's stages, and the functions of their actions.

A program is bound once: every action becomes a function without arguments, a closure over its module, its channel and
the rank's stores (`pipeloom.engine.rank_state`). A step is then one loop over these functions, without
look-ups (`InstructionList`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_native_id
from time import thread_time
from typing import Any

from pipeloom.engine.batch import Batch
from pipeloom.engine.binders.action_graphs import ActionGraphs
from pipeloom.engine.binders.computations import bind_backward, bind_forward, bind_weight_backward
from pipeloom.engine.binders.sequence_parts import in_tokens
from pipeloom.engine.binders.sequence_slices import in_slice
from pipeloom.engine.binders.transfers import bind_offload, bind_receive, bind_reload, bind_send, moved_keys
from pipeloom.engine.calls.refusals import PeerRefused
from pipeloom.engine.instructions import InstructionList, Run, explained
from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.pair_streams import PairStreams, backward_first
from pipeloom.engine.rank_state import Binder, RankState, RankWiring, Record, Step
from pipeloom.engine.stores.blocks import BlockSum
from pipeloom.engine.stores.gradient_sum import GradientSum
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program
from pipeloom.ir.walk import meets

# Runs the first instructions of a run, and returns how many of them are done.
WarmUp = Callable[["Worker", "Bound"], int]
WrapStep = Callable[[RankState, Action, Step], Step]

_BINDERS: dict[Op, Binder] = {
    Op.F: bind_forward,
    Op.B: bind_backward,
    Op.I: bind_backward,
    Op.W: bind_weight_backward,
    Op.SEND_F: bind_send,
    Op.SEND_B: bind_send,
    Op.RECV_F: bind_receive,
    Op.RECV_B: bind_receive,
    Op.SEND_SKIP: bind_send,
    Op.RECV_SKIP: bind_receive,
    Op.SEND_SKIP_GRAD: bind_send,
    Op.RECV_SKIP_GRAD: bind_receive,
    Op.OFFLOAD: bind_offload,
    Op.RELOAD: bind_reload,
}
RUNNABLE_OPS = frozenset(_BINDERS) | {Op.REDUCE_GRAD, Op.STEP}
_COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
_STORE_OPS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})


@dataclass(frozen=True, slots=True)
class Bound:
    """A program bound to one worker.

    Attributes:
        instructions: what it runs.
        program: what was bound.
        overlap: when the collectives and transfers of the last run were in flight; None: the program has none.
    """

    instructions: InstructionList
    program: Program
    overlap: OverlapTimes | None

    def records(self) -> list[Record]:
        """The last run: every action with its start and end, and when collectives and transfers were in flight."""
        overlapped = self.overlap.records() if self.overlap is not None else []
        known = {action for action, _, _ in overlapped}
        return [record for record in self.instructions.records() if record[0] not in known] + overlapped


class Worker:
    """Runs the programs of one rank.

    Args:
        wiring: what all its runs share.
        gradient_sum: sums gradients of parameters that other ranks hold too; None: there are none.
        block_sum: sums gradients over the processes that share a stage; None: there are none to sum.
        store: this rank's parameters.
        graphs: records and replays the actions of steps; None: they run one kernel after another.
        blackbox: a buffer of `BLACKBOX_BYTES` bytes: the label of the running action and its start, read after a crash.

    Attributes:
        rank, stages: the rank, and its modules by stage.
        state: values that this rank holds while it runs.
        overlap: when its collectives and transfers were in flight.
        thread: native number of the thread that runs it, or ran it last; 0: it has not run.
        processor_seconds: of each computation of a training step when it ran last, in one cell: of the thread that ran
            it. Empty on a device that computes while the host goes on, and in streams.
    """

    def __init__(
        self,
        wiring: RankWiring,
        *,
        gradient_sum: GradientSum | None,
        block_sum: BlockSum | None = None,
        store: ParameterStore,
        graphs: ActionGraphs | None = None,
        blackbox: Any,
    ) -> None:
        self.rank, self.stages = wiring.rank, wiring.stages
        self.state = RankState(wiring)
        self.overlap = store.times
        if wiring.mover is not None:
            wiring.mover.times = self.overlap
        self._gradient_sum, self._block_sum = gradient_sum, block_sum
        self._store, self._blackbox, self._graphs = store, blackbox, graphs
        self.thread = 0
        self.processor_seconds: dict[Action, list[float]] = {}
        if graphs is not None:
            graphs.add(self.state)
            self.state.arrive = graphs.arrive

    def bind(self, program: Program, wrap: WrapStep | None = None) -> Bound:
        """Turn this rank's part of `program` into functions, each of them as `wrap` returns it."""
        wiring = self.state.wiring
        self.state.to_offload = moved_keys(program, self.rank)
        order = backward_first(program, self.rank) if wiring.second else program.orders[self.rank]
        steps = ((action, step) for action in order for step in self.steps(action, program))
        if wiring.second:
            behind = frozenset(program.schedule.partners.values())
            steps = ((action, self._beside_forward(step) if action in behind else step) for action, step in steps)
        if not (wiring.device.is_asynchronous or program.schedule.forward_only):
            steps = ((action, self._timed(action, step)) for action, step in steps)
        if self._graphs is not None and not program.schedule.forward_only:
            steps = ((action, self._graphs.around(self.state, action, step)) for action, step in steps)
        if wrap is not None:
            steps = ((action, wrap(self.state, action, step)) for action, step in steps)
        trains_in_pairs = wiring.second and not program.schedule.forward_only
        instructions = self.bind_steps(steps, self._streams(program) if trains_in_pairs else None)
        return Bound(instructions, program, self.overlap if self._overlaps(program) else None)

    def _overlaps(self, program: Program) -> bool:
        return program.data is not None or self.state.wiring.mover is not None

    def _beside_forward(self, step: Step) -> Step:
        """A backward of a pair, which starts first: the activation of the forward counts as one beside its own."""
        (run, ready), state = step, self.state

        def beside() -> None:
            state.peak_live = max(state.peak_live, len(state.saved) - state.num_offloaded + 1)
            run()

        return beside, ready

    def _streams(self, program: Program) -> Callable[[Sequence[Action]], PairStreams]:
        wiring = self.state.wiring
        return lambda actions: PairStreams(wiring.device, program, self.rank, actions, wiring.second)

    def bind_steps(
        self, steps: Iterable[tuple[Action, Step]], streams: Callable[[Sequence[Action]], PairStreams] | None = None
    ) -> InstructionList:
        """Instructions of this rank, one per step; for `streams` see `InstructionList`."""
        wiring = self.state.wiring
        return InstructionList(
            self.rank,
            steps,
            device=wiring.device,
            blocking=wiring.transport.blocking,
            blackbox=self._blackbox,
            streams=streams,
        )

    def steps(self, action: Action, program: Program) -> list[Step]:
        """The functions of one action."""
        if meets(action):
            assert self._gradient_sum is not None
            (first, ready), *rest = self._gradient_sum.bind(action.stage)

            def begin() -> None:
                self._store.finish()  # sums over replicas come before sums over ranks
                first()

            return [(begin, ready), *rest]
        if action.op in _STORE_OPS:
            run, ready = self._store.bind(action, program)
            return [(self.overlap.running(action, run), ready)]
        binder = _BINDERS.get(action.op)
        if binder is None:
            raise InputError(
                f"action {action} on rank {self.rank}: the executor runs {', '.join(op.value for op in _BINDERS)} and "
                f"REDUCE_GRAD, and STEP in a stream. Use a schedule without {action.op}."
            )
        step = binder(self.state, action, program)
        if self.state.wiring.sliced and action.op in (Op.B, Op.I):
            step = in_slice(self.state, action, step)
        if self.state.wiring.parts is not None and action.op in (Op.B, Op.I):
            step = in_tokens(self.state, action, step)
        if action.op not in _COMPUTE_OPS:
            return [step]
        run, ready = self._store.around(action, step, program)
        return [(self.overlap.running(action, run) if self._overlaps(program) else run, ready)]

    def _timed(self, action: Action, step: Step) -> Step:
        """A computation notes its processor seconds: fewer than those of the clock where it waits, also for a core."""
        if action.op not in _COMPUTE_OPS:
            return step
        run, ready = step
        cell = self.processor_seconds.setdefault(action, [0.0])

        def timed() -> None:
            began = thread_time()
            run()
            cell[0] = thread_time() - began

        return timed, ready

    @contextmanager
    def evaluating(self, bound: Bound, batch: Batch, call: int) -> Iterator[None]:
        """Inside the block, instructions of a forward program run, as often as the caller likes."""
        self.state.begin(batch, call)
        if bound.overlap is not None:
            bound.overlap.begin()
        try:
            self._store.begin(bound.program)
            yield
            self._store.finish()
        finally:
            self.state.clear()
            self._store.end()

    def run(self, bound: Bound, batch: Batch, call: int, warm_up: WarmUp | None = None) -> Run:
        """Run a bound program; yields whenever it has to wait and the transport does not block.

        Args:
            call: the number of the call, sent with every message: equal on all ranks that make the same calls.
            warm_up: runs the first instructions, before the rest of the run begins.

        Raises:
            StageError: the module, the loss or autograd raised.
            PeerLost: a rank that it waited for ended.
            PeerRefused: a rank cannot use its batch.
        """
        self.thread = get_native_id()
        self.state.begin(batch, call)
        if bound.overlap is not None:
            bound.overlap.begin()
        self.state.loss_scale = self._store.loss_scale
        try:
            start = 0 if warm_up is None else warm_up(self, bound)
            trains = not bound.program.schedule.forward_only
            if self._block_sum is not None and trains:
                self._block_sum.begin()
            if self._gradient_sum is not None and trains:
                self._gradient_sum.begin()
            self._store.begin(bound.program)
            yield from bound.instructions.run(start)
            try:
                self._store.finish()
                if self._block_sum is not None and trains:
                    self._block_sum.finish()
            except Exception as error:
                raise explained(error, self.rank, bound.program.orders[self.rank][-1]) from error
        except PeerRefused:
            if self._gradient_sum is not None:
                self._gradient_sum.cancel()
            raise
        finally:
            self.state.clear()
            self._store.end()
