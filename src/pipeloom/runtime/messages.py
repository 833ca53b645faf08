"""Binders of SEND and RECV, and how ranks notice that they make different calls."""

from __future__ import annotations

from collections.abc import Callable

from pipeloom.errors import PeerLost, RunError
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.runtime.calls import call_name, cancel_number
from pipeloom.runtime.forward import bind_entry
from pipeloom.runtime.speculation import CancelledError
from pipeloom.runtime.state import RankState, Step
from pipeloom.runtime.transport import Channel, Lane, Message
from pipeloom.runtime.values import unflatten


def bind_send(state: RankState, action: Action, program: Program) -> Step:
    channel = Channel(state.rank, peer_of(action, program.placement), Lane.PIPELINE)
    end, departing = state.transport.outgoing(channel).send, state.departing
    state.sends[channel] = end

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
            message = next_message()
            if message.call != state.call:
                message = _of_this_call(state, channel.source, message, next_message)
            arrived[key] = enter(message.layout, message.tensors)
    else:

        def receive() -> None:
            message = next_message()
            if message.call != state.call:
                message = _of_this_call(state, channel.source, message, next_message)
            value = unflatten(message.layout, message.tensors)
            gradients[key] = value if isinstance(value, tuple) else (value,)

    return receive, end.ready


def _of_this_call(state: RankState, source: int, message: Message, receive: Callable[[], Message]) -> Message:
    """`message`, or the first behind it that belongs to this call; what a cancelled call left is dropped."""
    while message.call != state.call:
        if message.call == cancel_number(state.call):
            text = f"rank {source} gave up {call_name(state.call)}"
            raise CancelledError(text) if state.speculating else PeerLost(text)
        if message.call not in state.stale_calls:
            raise RunError(
                f"rank {source} is in {call_name(message.call)}, and this rank in {call_name(state.call)}: every "
                "rank makes the same calls in the same order"
            )
        message = receive()
    return message
