"""`SpeculativeWarmUp`: forwards that run before the update of their parameters is validated."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.common.random_states import RandomStates
from pipeloom.engine.calls.refusals import PeerRefused, send_refusals
from pipeloom.engine.rank_state import refuse_other_call
from pipeloom.engine.worker import Bound, Worker
from pipeloom.errors import PeerLost, RunError, StageError
from pipeloom.passes import warm_up_lengths
from pipeloom.training.post_validation.rank_update import RankUpdate
from pipeloom.transport.call_numbers import (
    Call,
    call_count,
    call_name,
    call_number,
    call_only,
    cancel_number,
    form_number_of,
    num_samples_of,
)
from pipeloom.transport.interface import Lane, program_channels
from pipeloom.transport.values import copied, flatten


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
        failure: RunError | PeerRefused | None = None
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
        except PeerRefused as error:
            failure = error
            send_refusals(state.wiring.transport, program_channels(bound.program), worker.rank, state.call, str(error))
        except StageError as error:  # wrong parameters may have made the stage raise
            failure = error
        finally:
            state.batch, self._speculating = batch, False
        if isinstance(failure, PeerRefused):
            self._update.validate()
            before.restore()
            raise failure
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
        state.call = call_number(
            call_count(call) + 1, Call.STEP, num_samples_of(state.call), form_number_of(state.call)
        )
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
        self._others_random = RandomStates.now() if with_random_state else None
        self._device_random = torch.cuda.get_rng_state() if on_device else None

    def restore(self) -> None:
        """Restore the copied state."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                module._buffers[name] = buffer.copy_(values)
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._others_random is not None:
            self._others_random.restore()
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)
