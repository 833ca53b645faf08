"""Binders of B, I and W: the backward of a forward, at once or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeloom.autograd.split_backward import Root, WeightGradients, backward_input, run_backward
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import flatten


def bind_backward(state: RankState, action: Action, program: Program) -> Step:
    key = (action.stage, action.microbatch, action.slice)
    begin, deliver = _bind_graph(state, action, program), _bind_delivery(state, action, program)
    saved = state.activations.saved

    def backward() -> None:
        leaves, roots, gradients = begin()
        if roots:
            run_backward(tuple(roots), tuple(gradients), False, False, (), True, True)
        if deliver is not None:
            deliver([leaf.grad for leaf in leaves])
        del saved[key]

    return backward, None


def bind_input_backward(state: RankState, action: Action, program: Program) -> Step:
    key = (action.stage, action.microbatch, action.slice)
    begin, deliver = _bind_graph(state, action, program), _bind_delivery(state, action, program)
    saved = state.activations.saved

    def backward() -> None:
        leaves, roots, gradients = begin()
        input_gradients, saved[key] = backward_input(roots, gradients, leaves)
        if deliver is not None:
            deliver(input_gradients)

    return backward, None


def bind_weight_backward(state: RankState, action: Action, program: Program) -> Step:
    key = (action.stage, action.microbatch, action.slice)
    saved = state.activations.saved

    def backward() -> None:
        held = saved[key]
        assert isinstance(held, WeightGradients)
        held.accumulate()
        del saved[key]

    return backward, None


def _bind_graph(
    state: RankState, action: Action, program: Program
) -> Callable[[], tuple[list[Tensor], list[Root], list[Tensor]]]:
    """The function that returns a backward's input leaves, its roots, and a gradient for each root."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    key = (stage, microbatch, piece)
    last = stage == program.schedule.num_stages - 1
    saved, arrived = state.activations.saved, state.activations.gradients
    mover = state.wiring.mover if key in state.activations.to_offload else None

    def begin() -> tuple[list[Tensor], list[Root], list[Tensor]]:
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
        pairs = [(root, gradient) for root, gradient in zip(roots, given, strict=True) if gradient is not None]
        return leaves, [root for root, _ in pairs], [gradient for _, gradient in pairs]

    return begin


def _bind_delivery(
    state: RankState, action: Action, program: Program
) -> Callable[[Sequence[Tensor | None]], None] | None:
    """The function that takes the gradients of a stage's inputs: passes them to the stage before, or to their SEND."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    if stage == 0:
        return None
    gradients, departing = state.activations.gradients, state.activations.departing
    before, send = (stage - 1, microbatch, piece), action.with_op(Op.SEND_B)
    here = program.placement.rank_of(stage - 1, microbatch) == state.wiring.rank

    def deliver(found: Sequence[Tensor | None]) -> None:
        if here:
            gradients[before] = found
        else:
            departing[send] = flatten(found[0] if len(found) == 1 else tuple(found), "a backward made")

    return deliver
