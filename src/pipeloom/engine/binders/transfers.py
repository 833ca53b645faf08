"""Binders of SEND and RECV, and of OFFLOAD and RELOAD.

Every message carries the number of the call and the number of samples of its batch; a RECV raises where ranks make
different calls, or have batches of different sizes. A rank that reads neither inputs nor targets takes the number of
samples from the first message that has it, and passes it on.

F         collects the tensors that autograd saves           (only where an OFFLOAD follows)
OFFLOAD   starts to write them elsewhere and frees their memory
RELOAD    starts to read them back
B, I      wait until they are back
"""

from collections.abc import Callable

from torch import Tensor

from pipeloom.engine.activation_mover import ActivationMover, Key
from pipeloom.engine.batch import sample_mismatch
from pipeloom.engine.binders.computations import bind_entry
from pipeloom.engine.binders.skips import bind_skip_receive
from pipeloom.engine.calls.refusals import PeerRefused
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.ir.action import SKIP_OPS
from pipeloom.transport.call_numbers import call_count, call_only, form_number_of, is_refusal, num_samples_of
from pipeloom.transport.interface import Channel, Message, lane_of
from pipeloom.transport.values import flatten, unflatten


def bind_send(state: RankState, action: Action, program: Program) -> Step:
    channel = Channel(state.wiring.rank, peer_of(action, program.placement), lane_of(action))
    end, departing = state.wiring.transport.outgoing(channel).send, state.departing

    def send() -> None:
        layout, tensors = departing.pop(action)
        end(layout, tensors, state.call)

    return send, None


def bind_receive(state: RankState, action: Action, program: Program) -> Step:
    stage, op, microbatch, piece = action
    key = (stage, microbatch, piece)
    channel = Channel(peer_of(action, program.placement), state.wiring.rank, lane_of(action))
    end = state.wiring.transport.incoming(channel)
    next_message, arrived, gradients = end.receive, state.arrived, state.gradients
    enter = bind_entry(state, stage, not program.schedule.forward_only) if op is Op.RECV_F else None

    def receive() -> None:
        message = next_message()
        if message.call != state.call:
            message = _of_this_call(state, channel.source, message, next_message)
        tensors = message.tensors if state.arrive is None else state.arrive(action, message.tensors)
        if enter is not None:
            arrived[key] = enter(message.layout, tensors)
        else:
            value = unflatten(message.layout, tensors)
            gradients[key] = value if isinstance(value, tuple) else (value,)

    def next_of_call() -> Message:
        message = next_message()
        return message if message.call == state.call else _of_this_call(state, channel.source, message, next_message)

    if op in SKIP_OPS:
        return bind_skip_receive(state, action, program, next_of_call)[0], end.ready
    return receive, end.ready


def _of_this_call(state: RankState, source: int, message: Message, receive: Callable[[], Message]) -> Message:
    """`message`, or the first one after it, that belongs to this call; `other_call` raises or accepts the others.

    Updates the number of samples of the batch and the number of its form, if the message has them.

    Raises:
        PeerRefused: a rank refused its batch, or has another number of samples or another form (without words: the
            ranks exchange their forms after a refusal).
    """
    while call_only(message.call) != call_only(state.call):
        if call_count(message.call) > state.last_refused:
            if is_refusal(message.call):
                raise PeerRefused(unflatten(message.layout, message.tensors))
            state.other_call(source, call_only(message.call), call_only(state.call))
        message = receive()
    sent, own = num_samples_of(message.call), num_samples_of(state.call)
    if sent and own and sent != own:
        reads_inputs, reads_targets = bool(state.batch.inputs), state.batch.targets is not None
        if reads_inputs != reads_targets:
            raise PeerRefused(sample_mismatch(own, sent) if reads_inputs else sample_mismatch(sent, own))
        raise PeerRefused(
            f"rank {source} has a batch of {sent} samples and this rank one of {own}: all ranks must step on the same "
            "batch. Pass the same one on every rank."
        )
    forms = form_number_of(message.call), form_number_of(state.call)
    if all(forms) and forms[0] != forms[1]:
        raise PeerRefused
    state.call = max(message.call, state.call)
    return message


def bind_offload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)
    contexts, module = state.contexts, state.wiring.stages[action.stage]
    context_key = (action.stage, action.microbatch)

    def offload() -> None:
        held = state.saved[key]
        assert isinstance(held, tuple)
        assert action.microbatch is not None
        elsewhere: list[Tensor] = [*module.parameters(), *module.buffers()]
        for values in (state.batch.inputs, state.batch.targets):
            if values:
                elsewhere += flatten(values[action.microbatch])[1]
        if context_key in contexts:
            elsewhere += contexts[context_key].tensors()
        mover.offload(key, held[0], {tensor.untyped_storage()._cdata for tensor in elsewhere})
        state.num_offloaded += 1

    return offload, None


def bind_reload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)

    def reload() -> None:
        mover.reload(key)
        state.num_offloaded -= 1
        state.peak_live = max(state.peak_live, len(state.saved) - state.num_offloaded)

    return reload, None


def _mover_of(state: RankState, action: Action) -> ActivationMover:
    if state.wiring.mover is None:
        raise InputError(
            f"action {action} on rank {state.wiring.rank}: no offload target configured. Pass offload to Pipeline."
        )
    return state.wiring.mover


def moved_keys(program: Program, rank: int) -> frozenset[Key]:
    """The activations that an OFFLOAD of a rank moves."""
    return frozenset((a.stage, a.microbatch, a.slice) for a in program.orders[rank] if a.op is Op.OFFLOAD)
