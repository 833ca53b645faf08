"""`Worker`: one rank's stages. `InstructionList`: the loop that runs its program; a stream runs it block by block.

A program is bound once: every action becomes a function without arguments, a closure over its module, its channel and
the rank's stores (`pipeloom.engine.rank_state`). A step is then one loop over these functions, without look-ups.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pipeloom.engine.binders.computations import bind_backward, bind_forward, bind_weight_backward
from pipeloom.engine.binders.sequence_slices import in_slice
from pipeloom.engine.binders.transfers import bind_offload, bind_receive, bind_reload, bind_send, moved_keys
from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import Batch, Binder, RankState, RankWiring, Step
from pipeloom.engine.stores.gradient_sum import GradientSum
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.errors import CallerError, InputError, PeerLost, PipeloomError, RunError, StageError, one_line, unwrapped
from pipeloom.ir import Action, Op, Program
from pipeloom.ir.walk import meets
from pipeloom.processes.launcher import BLACKBOX_BYTES, label_of

# What one rank does in a call. It yields whenever it has to wait and the transport does not block.
Run = Generator[None]

Record = tuple[Action, float, float]  # an action, and when it started and ended (time.perf_counter, seconds)

# Runs the first instructions of a run, and returns how many of them are done.
WarmUp = Callable[["Worker", "Bound"], int]

_BINDERS: dict[Op, Binder] = {
    Op.F: bind_forward,
    Op.B: bind_backward,
    Op.I: bind_backward,
    Op.W: bind_weight_backward,
    Op.SEND_F: bind_send,
    Op.SEND_B: bind_send,
    Op.RECV_F: bind_receive,
    Op.RECV_B: bind_receive,
    Op.OFFLOAD: bind_offload,
    Op.RELOAD: bind_reload,
}
RUNNABLE_OPS = frozenset(_BINDERS) | {Op.REDUCE_GRAD, Op.STEP}
_COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
_STORE_OPS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One `Step` of an action.

    Attributes:
        action: what the step belongs to; an action may have several steps.
        run: runs the step.
        ready: asked before `run` until it returns True, where one thread drives several ranks; None: never asked.
        label: of the action, for the black box.
    """

    action: Action
    run: Callable[[], None]
    ready: Callable[[], bool] | None
    label: bytes


class InstructionList:
    """Instructions of one rank in order, and the times of their last run.

    Args:
        blocking: whether steps may block; else they are asked whether they are ready.
        blackbox: a buffer for the label of the running action; None: without labels.
    """

    def __init__(self, rank: int, steps: Iterable[tuple[Action, Step]], *, blocking: bool, blackbox: Any) -> None:
        self._instructions = tuple(
            Instruction(action, run, None if blocking else ready, label_of(action)) for action, (run, ready) in steps
        )
        self._rank, self._blackbox = rank, blackbox
        self._starts = [0.0] * len(self._instructions)
        self._ends = [0.0] * len(self._instructions)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._instructions)

    def run(self, start: int = 0, stop: int | None = None) -> Run:
        """Run the instructions from `start` to before `stop`; yields whenever one is not ready.

        Raises:
            StageError: a step raised.
            PeerLost: a rank it waited for went away.
        """
        starts, ends, blackbox = self._starts, self._ends, self._blackbox
        position = start
        try:
            for position, instruction in enumerate(self._instructions[start:stop], start):
                if instruction.ready is not None:
                    while not instruction.ready():
                        yield
                if blackbox is not None:
                    blackbox[:BLACKBOX_BYTES] = instruction.label
                starts[position] = perf_counter()
                instruction.run()
                ends[position] = perf_counter()
        except CallerError:
            raise
        except Exception as error:
            raise explained(error, self._rank, self._instructions[position].action) from error

    def records(self) -> Iterator[Record]:
        """Every instruction with its last start and end; 0.0 where it has not run yet."""
        actions = (instruction.action for instruction in self._instructions)
        return zip(actions, self._starts, self._ends, strict=True)


def explained(error: Exception, rank: int, action: Action) -> PipeloomError:
    """`error` with the rank, stage, action and micro-batch in which it was raised."""
    where = f"rank {rank}, stage {action.stage}, action {action}"
    if action.microbatch is not None:
        where += f", {'update' if action.op is Op.STEP else 'micro-batch'} {action.microbatch}"
    if isinstance(error, RunError):
        kind = PeerLost if isinstance(error, PeerLost) else RunError
        return kind(f"{where}: {unwrapped(str(error))}")
    return StageError(f"{where}: {one_line(error)}")


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
        store: this rank's parameters.
        blackbox: a buffer of at least `BLACKBOX_BYTES` bytes for the label of the running action, read after a crash.

    Attributes:
        rank, stages: the rank, and its modules by stage.
        state: values that this rank holds while it runs.
        overlap: when its collectives and transfers were in flight.
    """

    def __init__(
        self, wiring: RankWiring, *, gradient_sum: GradientSum | None, store: ParameterStore, blackbox: Any
    ) -> None:
        self.rank, self.stages = wiring.rank, wiring.stages
        self.state = RankState(wiring)
        self.overlap = store.times
        if wiring.mover is not None:
            wiring.mover.times = self.overlap
        self._gradient_sum, self._store, self._blackbox = gradient_sum, store, blackbox

    def bind(self, program: Program) -> Bound:
        """Turn this rank's part of `program` into functions."""
        self.state.to_offload = moved_keys(program, self.rank)
        order = program.orders[self.rank]
        instructions = self.bind_steps((action, step) for action in order for step in self.steps(action, program))
        return Bound(instructions, program, self.overlap if self._overlaps(program) else None)

    def _overlaps(self, program: Program) -> bool:
        return program.data is not None or self.state.wiring.mover is not None

    def bind_steps(self, steps: Iterable[tuple[Action, Step]]) -> InstructionList:
        """Instructions of this rank, one per step."""
        return InstructionList(self.rank, steps, blocking=self.state.wiring.transport.blocking, blackbox=self._blackbox)

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
        if action.op not in _COMPUTE_OPS:
            return [step]
        run, ready = self._store.around(action, step, program)
        return [(self.overlap.running(action, run) if self._overlaps(program) else run, ready)]

    def run(self, bound: Bound, batch: Batch, call: int, warm_up: WarmUp | None = None) -> Run:
        """Run a bound program; yields whenever it has to wait and the transport does not block.

        Args:
            call: the number of the call, sent with every message: equal on all ranks that make the same calls.
            warm_up: runs the first instructions, before the rest of the run begins.

        Raises:
            StageError: the module, the loss or autograd raised.
            PeerLost: a rank that it waited for ended.
        """
        self.state.begin(batch, call)
        if bound.overlap is not None:
            bound.overlap.begin()
        self.state.loss_scale = self._store.loss_scale
        try:
            start = 0 if warm_up is None else warm_up(self, bound)
            if self._gradient_sum is not None and not bound.program.schedule.forward_only:
                self._gradient_sum.begin()
            self._store.begin(bound.program)
            yield from bound.instructions.run(start)
            try:
                self._store.finish()
            except Exception as error:
                raise explained(error, self.rank, bound.program.orders[self.rank][-1]) from error
        finally:
            self.state.clear()
            self._store.end()
