"""Binders of F: run the stage, and hand on, lay out for sending, or rate what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import RunError
from pipeloom.ir import Action, Op, Program
from pipeloom.runtime.split_backward import Root
from pipeloom.runtime.state import RankState, Step
from pipeloom.runtime.values import Layout, Value, flatten, unflatten


def bind_forward(state: RankState, action: Action, program: Program) -> Step:
    stage, _, microbatch, piece = action
    assert microbatch is not None
    key = (stage, microbatch, piece)
    training = not program.schedule.forward_only
    module, arrived, saved = state.stages[stage], state.arrived, state.saved
    deliver = _bind_delivery(state, action, program) if stage < program.schedule.num_stages - 1 else None
    loss = _bind_loss(state, microbatch) if deliver is None else None
    first = stage == 0

    def forward() -> None:
        value, leaves = (state.batch.inputs[microbatch], []) if first else arrived.pop(key)
        saved[key] = None
        if len(saved) > state.peak_live_activations:
            state.peak_live_activations = len(saved)
        try:
            output = module(value)
        except RuntimeError as error:
            if not leaves or "a leaf Variable that requires grad" not in str(error):
                raise
            output = module(_copied(state, stage, value))
        if deliver is not None:
            roots = deliver(output)
        else:
            assert loss is not None
            roots = loss(output)
        if training:
            saved[key] = (leaves, roots)
        else:
            del saved[key]

    return forward, None


def _copied(state: RankState, stage: int, value: Value) -> Value:
    """A copy of a stage's input, which the stage changes in place; from now on it always gets one."""
    state.copies_input[stage] = True
    layout, tensors = flatten(value)
    return unflatten(layout, [tensor.clone() for tensor in tensors])


def _bind_loss(state: RankState, microbatch: int) -> Callable[[Value], list[Root]]:
    """What the last stage does with its output: the loss, or keeping it for the caller."""

    def finish(output: Value) -> list[Root]:
        batch = state.batch
        if batch.targets is None or state.loss_fn is None:
            batch.outputs[microbatch] = output
            return []
        loss = state.loss_fn(output, batch.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError(f"loss_fn returned {shape}: it returns one number, the mean over the micro-batch")
        if not loss.dtype.is_floating_point:
            raise RunError(f"loss_fn returned a {loss.dtype}: a mean is a floating-point number; convert it")
        batch.losses[microbatch] = loss.detach() * state.seed(batch.weights[microbatch], loss)
        return [_root(loss)] if loss.requires_grad else []

    return finish


def _bind_delivery(state: RankState, action: Action, program: Program) -> Callable[[Value], list[Root]]:
    """What a stage does with its output: hand it to the next stage here, or lay it out for its SEND."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    here = program.placement.rank_of(stage + 1, microbatch) == state.rank
    next_key = (stage + 1, microbatch, piece)
    send = action.with_op(Op.SEND_F)
    departing, arrived = state.departing, state.arrived
    enter = bind_entry(state, stage + 1, not program.schedule.forward_only) if here else None

    def deliver(output: Value) -> list[Root]:
        layout, tensors = flatten(output)
        detached = [tensor.detach() for tensor in tensors]
        if enter is not None:
            arrived[next_key] = enter(layout, detached)
        else:
            departing[send] = (layout, detached)
        return [_root(tensor) for tensor in tensors if tensor.requires_grad]

    return deliver


def bind_entry(
    state: RankState, stage: int, training: bool
) -> Callable[[Layout, list[Tensor]], tuple[Value, list[Tensor]]]:
    """How a value enters a stage: its tensors that want a gradient become leaves of a new graph."""
    copies_input = state.copies_input

    def enter(layout: Layout, tensors: list[Tensor]) -> tuple[Value, list[Tensor]]:
        if not training:
            return unflatten(layout, tensors), []
        leaves = [t.requires_grad_() for t, (_, _, wants) in zip(tensors, layout.specs, strict=True) if wants]
        if copies_input[stage]:
            tensors = [tensor.clone() for tensor in tensors]
        return unflatten(layout, tensors), leaves

    return enter


def _root(tensor: Tensor) -> Root:
    """Where a backward starts. The edge of the graph keeps no numbers alive, unlike the tensor."""
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return get_gradient_edge(tensor)  # the graph of a Python function needs a token to stay alive
    return GradientEdge(node, tensor.output_nr)
