"""Binders of SEND and RECV, and how ranks notice that they make different calls."""

from __future__ import annotations

from pipeloom.errors import RunError
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.runtime.forward import bind_entry
from pipeloom.runtime.state import RankState, Step
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
                raise _out_of_step(channel.source, call, state.call)
            arrived[key] = enter(layout, tensors)
    else:

        def receive() -> None:
            layout, tensors, call = next_message()
            if call != state.call:
                raise _out_of_step(channel.source, call, state.call)
            value = unflatten(layout, tensors)
            gradients[key] = value if isinstance(value, tuple) else (value,)

    return receive, end.ready


def call_number(count: int, training: bool) -> int:
    """What goes with every message of a pipeline's `count`-th call."""
    return 2 * count + training


def _call_name(call: int) -> str:
    return f"call {call // 2} of this Pipeline, {'step' if call % 2 else 'evaluate or forward'}"


def _out_of_step(source: int, theirs: int, ours: int) -> RunError:
    return RunError(
        f"rank {source} is in {_call_name(theirs)}, and this rank in {_call_name(ours)}: every rank makes the "
        "same calls in the same order"
    )
