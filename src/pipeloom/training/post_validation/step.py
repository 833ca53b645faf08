"""The optimizer step without a barrier: post-validation (Zero Bubble, arXiv:2401.10241, section 4).

Clipping and the check for finite gradients need the gradients of all ranks, so with a barrier all ranks wait for the
slowest. The result is nearly always "update, without clipping". Here each rank adds its share to the sum of the earlier
ranks, passes the sum on, updates as if it were complete, and begins its next step. The last rank has the complete sum
and sends it back to the earlier ranks, which receive it during their warm-up and validate their update.

    rank 0   B W W |U0| F F F F F . . . V B        U0..U2: update, by the sum of the shares so far
    rank 1     B W W |U1| F F F . . . V B          U2 has the complete sum
    rank 2       B W W |U2| F B                    V: validate, before the first backward
              shares ─▶ ─▶   ◀─ ◀─ all shares

If the update of any rank was wrong, all ranks cancel the forwards of their warm-up, the ranks with a wrong update undo
it and make the right one, and all ranks begin the step again. At its first backward, every rank therefore has bitwise
the same values as with a barrier.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.rank_state import refuse_other_call
from pipeloom.engine.worker import Bound, Worker
from pipeloom.errors import InputError, PeerLost, RunError, StageError
from pipeloom.passes import warm_up_lengths
from pipeloom.training.optimizer_step import Numbers, OptimizerStep, Update
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.post_validation.rank_update import RankUpdate
from pipeloom.transport.interface import (
    Lane,
    call_count,
    call_name,
    call_number,
    call_only,
    cancel_number,
    num_samples_of,
    program_channels,
)
from pipeloom.transport.values import Value, copied, flatten


class PostValidatedStep(OptimizerStep):
    """Updates without waiting for later ranks; a rank whose update was wrong undoes and repeats it.

    Works with torch optimizers whose update of a parameter depends only on that parameter, its gradient, its state and
    the options of its group. Each rank holds a second copy of its parameters, gradients and optimizer state. Other
    calls of the pipeline settle first. Call `settle` before you read weights or optimizer state, and at the end.

    Attributes:
        num_updates: updates so far.
        num_rollbacks: for each rank of this process, the number of updates that it undid.
        num_repeats: the number of repeated warm-ups.

    Raises:
        InputError: see `OptimizerStep`; later, an optimizer that keeps state in the options of its groups.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf) -> None:
        if pipeline.state.sharing.axis is not None:
            raise InputError(
                "PostValidatedStep supports neither data parallelism nor 16-bit formats: it updates the model's own "
                "parameters. Use BarrierStep."
            )
        super().__init__(pipeline, optimizer, max_norm=max_norm)
        if not isinstance(optimizer.state, dict):
            raise InputError(
                f"PostValidatedStep does not support {type(optimizer).__name__}, which offloads its states: an update "
                "that may be undone needs them in memory. Use BarrierStep, or do not offload states."
            )
        self._executor = pipeline.executor
        ranks = self._executor.local_ranks
        self._ranks = {rank: RankUpdate(rank, pipeline, optimizer, max_norm) for rank in ranks}
        self._warm_ups = {
            rank: SpeculativeWarmUp(update, draws_alone=len(ranks) == 1) for rank, update in self._ranks.items()
        }
        self._pending = False
        self.num_updates = 0
        self.num_repeats = 0

    @property
    def num_rollbacks(self) -> dict[int, int]:
        return {rank: update.num_rollbacks for rank, update in self._ranks.items()}

    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        validates = self._executor.before_call == self._validate  # the previous update is not validated yet
        warm_up = (lambda worker, bound: self._warm_ups[worker.rank](worker, bound)) if validates else None
        losses = self._pipeline.accumulate(inputs, targets, warm_up=warm_up)
        final = self._final()
        own = numbers().double() if numbers is not None else torch.empty(0, dtype=torch.float64)
        self.num_updates += 1
        with self._executor.ended_by_errors():
            for update in self._ranks.values():
                update.begin(self.num_updates, losses, own)
                losses, own = {}, torch.zeros_like(own)  # only the first rank of a process adds them
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or learning rate schedulers warn
        self._pending = True
        self._executor.before_call = self._validate
        return final

    def settle(self) -> list[Update]:
        self._executor.settle()
        return self._final()

    def _validate(self) -> None:
        """Make the update final on all ranks of this process, before any other call runs."""
        with self._executor.ended_by_errors():
            for update in reversed(self._ranks.values()):  # the last rank has the sum first
                update.validate()
            self._executor.connection.transport.end_step()

    def _final(self) -> list[Update]:
        """The previous update, which all ranks of this process have validated."""
        if not self._pending:
            return []
        self._pending = False
        first = next(iter(self._ranks.values()))
        self.num_repeats += not first.stands
        return [first.final()]


class CancelledCall(PeerLost):
    """Another rank cancelled the call whose warm-up this rank runs."""


class SpeculativeWarmUp:
    """The warm-up of one rank, for `Executor.run`. It ends as soon as the last update can be validated.

    Its forwards run before their parameters are validated. A rank that repeats them takes the number of the next call.
    It sends its peers a message without a value, whose number names the cancelled call.

    Args:
        update: the last update of the rank.
        draws_alone: whether this rank alone draws from the random generators of the process.
    """

    def __init__(self, update: RankUpdate, *, draws_alone: bool) -> None:
        self._update, self._draws_alone = update, draws_alone
        self._speculating = False  # whether the running forwards may have to be repeated
        self._cancelled: tuple[int, ...] = ()  # numbers of cancelled calls whose messages may still arrive
        self._bound: Bound | None = None
        self._length = 0  # instructions of the warm-up of `_bound`

    def __call__(self, worker: Worker, bound: Bound) -> int:
        """Run forwards until the parameters are validated; returns how many instructions are done."""
        state, batch = worker.state, worker.state.batch
        state.other_call = self._take_other_call
        before = ForwardState(worker.stages.values(), with_random_state=self._draws_alone)
        losses: dict[int, Tensor] = {}  # of slices, they add up: only losses that stand may enter the batch
        # Stages may change their inputs in place.
        state.batch = replace(batch, inputs=_Copies(batch.inputs), losses=losses)
        failure: RunError | None = None
        position, length = 0, self._length_of(bound, worker.rank)
        self._speculating = True
        try:
            while position < length and not self._update.ready():
                for _ in bound.instructions.run(position, position + 1):
                    pass
                position += 1
        except PeerLost as error:
            if not isinstance(error.__cause__, CancelledCall):
                raise
            failure = error
        except StageError as error:  # wrong parameters may have made the stage raise
            failure = error
        finally:
            state.batch, self._speculating = batch, False
        if failure is not None:  # before any wait: peers may wait for what this rank will not send
            _cancel(worker, bound)
        if self._update.validate():
            if failure is not None:
                raise failure
            batch.losses.update(losses)
            return position
        if failure is None:
            _cancel(worker, bound)
        state.forget()
        state.peak_live = 0
        before.restore()
        call = call_only(state.call)
        self._cancelled = (call, cancel_number(call))
        state.call = call_number(call_count(call) + 1, True, num_samples_of(state.call))
        return 0

    def _take_other_call(self, source: int, theirs: int, ours: int) -> None:
        """Called with messages of other calls; those of cancelled calls are dropped."""
        if theirs == cancel_number(ours):
            text = f"rank {source} cancelled {call_name(ours)}"
            raise CancelledCall(text) if self._speculating else PeerLost(text)
        if theirs not in self._cancelled:
            refuse_other_call(source, theirs, ours)

    def _length_of(self, bound: Bound, rank: int) -> int:
        if self._bound is not bound:
            actions = set(bound.program.orders[rank][: warm_up_lengths(bound.program)[rank]])
            self._bound = bound
            self._length = sum(1 for _ in takewhile(lambda each: each.action in actions, bound.instructions))
        return self._length


def _cancel(worker: Worker, bound: Bound) -> None:
    """Notify every rank that may wait for a message of this call."""
    for channel in sorted(program_channels(bound.program)):
        if channel.source == worker.rank and channel.lane is Lane.PIPELINE:
            end = worker.state.wiring.transport.outgoing(channel)
            end.send(*flatten(None), cancel_number(worker.state.call))


class _Copies(Sequence[Any]):
    """Copies of values, made when they are read."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return copied(self._values[index])


class ForwardState:
    """Copies of state that forwards change outside the graph: buffers, such as running means, and random generators."""

    def __init__(self, modules: Iterable[nn.Module], *, with_random_state: bool) -> None:
        self._buffers = [  # owner, name, the buffer and a copy of it
            (module, name, buffer, buffer.clone())
            for stage in modules
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        on_device = with_random_state and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._random = torch.get_rng_state() if with_random_state else None
        self._device_random = torch.cuda.get_rng_state() if on_device else None

    def restore(self) -> None:
        """Restore the copied state."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                module._buffers[name] = buffer.copy_(values)
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)
