"""Binders of OFFLOAD and RELOAD.

F         collects the tensors that autograd saves           (only where an OFFLOAD follows)
OFFLOAD   starts to write them elsewhere and frees their memory
RELOAD    starts to read them back
B, I      wait until they are back
"""

from __future__ import annotations

from torch import Tensor

from pipeloom.engine.activation_mover import ActivationMover, Key
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import flatten


def bind_offload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)
    saved, module = state.saved, state.stages[action.stage]
    context_key = (action.stage, action.microbatch)

    def offload() -> None:
        held = saved[key]
        assert isinstance(held, tuple)
        assert action.microbatch is not None
        elsewhere: list[Tensor] = [*module.parameters(), *module.buffers()]
        for values in (state.batch.inputs, state.batch.targets):
            if values:
                elsewhere += flatten(values[action.microbatch])[1]
        if context_key in state.contexts:
            elsewhere += state.contexts[context_key].tensors()
        mover.offload(key, held[0], {tensor.untyped_storage()._cdata for tensor in elsewhere})
        state.num_away += 1

    return offload, None


def bind_reload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)

    def reload() -> None:
        mover.reload(key)
        state.num_away -= 1
        state.note_live()

    return reload, None


def _mover_of(state: RankState, action: Action) -> ActivationMover:
    if state.mover is None:
        raise InputError(
            f"action {action} on rank {state.rank}: no offload target configured. Pass offload to Pipeline."
        )
    return state.mover


def moved_keys(program: Program, rank: int) -> frozenset[Key]:
    """The activations that an OFFLOAD of a rank moves."""
    return frozenset((a.stage, a.microbatch, a.slice) for a in program.orders[rank] if a.op is Op.OFFLOAD)
