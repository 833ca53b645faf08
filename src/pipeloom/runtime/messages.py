"""Binders of SEND and RECV, and how ranks notice that they make different calls, or are given different batches.

With every message goes a number: which call this is, and how many samples its batch has. A rank that reads neither
inputs nor targets learns the latter from the first message that says it, and passes it on.
"""

from __future__ import annotations

from pipeloom.errors import RunError
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.runtime.forward import bind_entry
from pipeloom.runtime.state import RankState, Step, unequal_lengths
from pipeloom.runtime.transport import Channel, Lane
from pipeloom.runtime.values import unflatten


def bind_send(state: RankState, action: Action, program: Program) -> Step:
    channel = Channel(state.rank, peer_of(action, program.placement), Lane.PIPELINE)
    end, departing = state.transport.outgoing(channel).send, state.departing

    def send() -> None:
        layout, tensors = departing.pop(action)
        end(layout, tensors, state.call)

    return send, None


def bind_receive(state: RankState, action: Action, program: Program) -> Step:
    stage, op, microbatch, piece = action
    key = (stage, microbatch, piece)
    channel = Channel(peer_of(action, program.placement), state.rank, Lane.PIPELINE)
    end = state.transport.incoming(channel)
    next_message, arrived, gradients = end.receive, state.arrived, state.gradients
    if op is Op.RECV_F:
        enter = bind_entry(state, stage, not program.schedule.forward_only)

        def receive() -> None:
            layout, tensors, call = next_message()
            if call != state.call:
                state.call = _agreed(state, channel.source, call)
            arrived[key] = enter(layout, tensors)
    else:

        def receive() -> None:
            layout, tensors, call = next_message()
            if call != state.call:
                state.call = _agreed(state, channel.source, call)
            value = unflatten(layout, tensors)
            gradients[key] = value if isinstance(value, tuple) else (value,)

    return receive, end.ready


_COUNT_BITS = 36  # of 64; more calls than anybody makes, and batches of up to 2**28 samples
_MAX_SAMPLES = 1 << 28


def call_number(count: int, training: bool, num_samples: int) -> int:
    """What goes with every message of a pipeline's `count`-th call; `num_samples` is 0 where nobody said yet."""
    return (min(num_samples, _MAX_SAMPLES - 1) << _COUNT_BITS) | 2 * count + training


def _agreed(state: RankState, source: int, theirs: int) -> int:
    """The number that holds from now on, where rank `source` sent one that is not ours."""
    ours, mask = state.call, (1 << _COUNT_BITS) - 1
    if theirs & mask != ours & mask:
        raise _out_of_step(source, theirs & mask, ours & mask)
    sent, own = theirs >> _COUNT_BITS, ours >> _COUNT_BITS
    if sent and own:
        reads_inputs, reads_targets = bool(state.batch.inputs), state.batch.targets is not None
        if reads_inputs != reads_targets:
            raise RunError(unequal_lengths(own, sent) if reads_inputs else unequal_lengths(sent, own))
        raise RunError(
            f"rank {source} has a batch of {sent} samples and this rank one of {own}: a step has one batch; pass the "
            "same on every rank"
        )
    return max(theirs, ours)


def _call_name(call: int) -> str:
    return f"call {call // 2} of this Pipeline, {'step' if call % 2 else 'evaluate or forward'}"


def _out_of_step(source: int, theirs: int, ours: int) -> RunError:
    return RunError(
        f"rank {source} is in {_call_name(theirs)}, and this rank in {_call_name(ours)}: every rank makes the "
        "same calls in the same order"
    )
