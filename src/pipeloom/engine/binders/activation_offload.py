"""Binders of OFFLOAD and RELOAD.

F         collects the tensors that autograd saves           (only where an OFFLOAD follows)
OFFLOAD   starts to write them elsewhere and frees their memory
RELOAD    starts to read them back
B, I      wait until they are back
"""

from __future__ import annotations

from torch import Tensor

from pipeloom.engine.overlap_times import ActivationMover, Key
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import flatten


def bind_offload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)
    activations, contexts, module = state.activations, state.activations.contexts, state.wiring.stages[action.stage]
    context_key = (action.stage, action.microbatch)

    def offload() -> None:
        held = activations.saved[key]
        assert isinstance(held, tuple)
        assert action.microbatch is not None
        elsewhere: list[Tensor] = [*module.parameters(), *module.buffers()]
        for values in (state.batch.inputs, state.batch.targets):
            if values:
                elsewhere += flatten(values[action.microbatch])[1]
        if context_key in contexts:
            elsewhere += contexts[context_key].tensors()
        mover.offload(key, held[0], {tensor.untyped_storage()._cdata for tensor in elsewhere})
        activations.num_offloaded += 1

    return offload, None


def bind_reload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)
    activations = state.activations

    def reload() -> None:
        mover.reload(key)
        activations.num_offloaded -= 1
        activations.peak_live = max(activations.peak_live, len(activations.saved) - activations.num_offloaded)

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
