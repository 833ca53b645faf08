"""Binders of B, I and W: the backward of a forward, at once or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeloom.autograd.split_backward import WeightGradients, backward_input, run_backward
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import flatten


def bind_backward(state: RankState, action: Action, program: Program) -> Step:
    """B, or I, which keeps what its W needs."""
    stage, op, microbatch, piece = action
    assert microbatch is not None
    key, splits, last = (stage, microbatch, piece), op is Op.I, stage == program.schedule.num_stages - 1
    saved, arrived = state.saved, state.gradients
    mover = state.wiring.mover if key in state.to_offload else None
    deliver = _bind_delivery(state, action, program) if stage > 0 else None

    def backward() -> None:
        if mover is not None:
            mover.arrive(key)
        held = saved[key]
        assert isinstance(held, tuple)
        leaves, roots = held
        given: Sequence[Tensor | None]
        if last:
            weight = state.loss_weights.pop(key) * state.loss_scale
            given = [state.seed(weight, state.batch.losses[microbatch])] if roots else ()
        else:
            given = arrived.pop(key)
        starts, gradients = [], []
        for root, gradient in zip(roots, given, strict=True):
            if gradient is not None:
                starts.append(root)
                gradients.append(gradient)
        if splits:
            found, saved[key] = backward_input(starts, gradients, leaves)
        else:
            if starts:
                run_backward(tuple(starts), tuple(gradients), False, False, (), True, True)
            del saved[key]
            found = [leaf.grad for leaf in leaves] if leaves else []
        if deliver is not None:
            deliver(found)

    return backward, None


def bind_weight_backward(state: RankState, action: Action, program: Program) -> Step:
    key = (action.stage, action.microbatch, action.slice)
    saved = state.saved

    def backward() -> None:
        held = saved.pop(key)
        assert isinstance(held, WeightGradients)
        held.accumulate()

    return backward, None


def _bind_delivery(state: RankState, action: Action, program: Program) -> Callable[[Sequence[Tensor | None]], None]:
    """The function that takes the gradients of a stage's inputs: passes them to the stage before, or to their SEND."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    gradients, departing = state.gradients, state.departing
    before, send = (stage - 1, microbatch, piece), action.with_op(Op.SEND_B)
    here = program.placement.rank_of(stage - 1, microbatch) == state.wiring.rank

    def deliver(found: Sequence[Tensor | None]) -> None:
        if here:
            gradients[before] = found
        else:
            departing[send] = flatten(found[0] if len(found) == 1 else tuple(found), "a backward made")

    return deliver
