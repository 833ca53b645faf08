"""Binders of F, B, I and W.

F runs the stage, and passes its output to the next stage or to the loss. B is its backward, at once; I and W are the
two halves of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from pipeloom.autograd.loss_metrics import separate
from pipeloom.autograd.split_backward import Root, WeightGradients, backward_input, root_of, run_backward
from pipeloom.common.overlaps import overlapping, share_storage
from pipeloom.engine.batch import Extent
from pipeloom.engine.binders.auxiliary import add_declared, keep_declared, keep_metrics
from pipeloom.engine.binders.inputs import StageInputs
from pipeloom.engine.binders.sequence_parts import module_of_tokens
from pipeloom.engine.binders.sequence_slices import cut_slice, join_slices, sliced_module
from pipeloom.engine.binders.skips import SkipValues, bind_skip_gradients, bind_skip_values
from pipeloom.engine.rank_state import RankState, RankWiring, Step
from pipeloom.errors import RunError, one_line
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import Layout, Value, flatten, unflatten, with_overlapping

_NOT_WATCHED = nullcontext()


def bind_forward(state: RankState, action: Action, program: Program) -> Step:
    stage, _, microbatch, piece = action
    assert microbatch is not None
    key = (stage, microbatch, piece)
    training = not program.schedule.forward_only
    wiring, arrived, saved = state.wiring, state.arrived, state.saved
    run = wiring.forwards[stage] if training else wiring.stages[stage]
    module = sliced_module(state, action, program, run) if wiring.sliced else run
    if wiring.parts is not None:
        module = module_of_tokens(state, action, program, run)
    skips = bind_skip_values(state, action, program, wiring.stages[stage], run) if program.skips else None
    if skips is not None:
        module = skips.run
    first, last = stage == 0, stage == program.schedule.num_stages - 1
    # A model that computes its own loss gets the targets among its arguments.
    joined = getattr(wiring.stages[stage], "joined", None) if getattr(wiring.loss_fn, "joins_targets", False) else None
    watching = getattr(wiring.loss_fn, "watching", nullcontext) if last else nullcontext
    compare_halves = getattr(wiring.loss_fn, "compare_halves", None) if last and training else None
    mover = wiring.mover if key in state.to_offload else None
    inputs = StageInputs(wiring, stage, training=training)
    finish = _bind_loss(state, action, program) if last else _bind_output(state, action, program, inputs, skips)
    from_other_stream = training and wiring.between_streams(stage, stage - 1)

    def forward() -> None:
        value, leaves, shared = (state.batch.inputs[microbatch], [], ()) if first else arrived.pop(key)
        if from_other_stream:
            _use_here(wiring, flatten(value)[1])
        value = inputs.take(value, shared)
        if skips is not None:
            leaves = skips.take(leaves)
        targets = state.batch.targets if last else None
        target = None if targets is None else targets[microbatch]  # streams release it: read once
        if joined is not None and isinstance(target, Mapping):
            value = joined(value, target)
        saved[key] = None
        live = len(saved) - state.num_offloaded
        if live > state.peak_live:
            state.peak_live = live
        with _NOT_WATCHED if targets is None else watching():
            output, collected = inputs.run(module, value, leaves)
        with collected:
            roots = finish(output, target)
            if skips is not None:
                roots += skips.hand_out()
        if compare_halves is not None and targets is not None:
            compare_halves(wiring.stages[stage], value, output)
        trains = bool(roots)
        if collected.losses or collected.observed:
            trains |= keep_declared(state, action, program, collected, output)
        without_gradient = last and training and not trains and microbatch in state.batch.losses
        if without_gradient and (leaves or any(p.requires_grad for p in wiring.stages[stage].parameters())):
            raise RunError(
                "the loss requires no gradient, but parameters do: no parameter would be trained. Remove detach(), "
                "item() and no_grad() from loss_fn and the last stage, or freeze the parameters."
            )
        if training:
            saved[key] = (leaves, roots)
        else:
            del saved[key]

    if mover is None:
        return forward, None

    def caught_forward() -> None:
        with mover.catching(key):
            forward()

    return caught_forward, None


def _bind_loss(state: RankState, action: Action, program: Program) -> Callable[[Value, Value], list[Root]]:
    """The function that takes the last stage's output: computes the loss, or keeps the output for the caller."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    key, loss_fn, sliced = (stage, microbatch, piece), state.wiring.loss_fn, state.wiring.sliced
    is_pair = sliced or state.wiring.parts is not None

    def finish(value: Value, target: Value) -> list[Root]:
        batch = state.batch
        output: Value = value[0] if is_pair else value
        if batch.targets is None or loss_fn is None:
            if sliced:
                pieces = batch.outputs.setdefault(microbatch, [])
                pieces.append(output)
                output = join_slices(pieces) if len(pieces) == program.schedule.num_slices else pieces
            batch.outputs[microbatch] = output
            return []
        weight = batch.weights[microbatch]
        if sliced:
            extent = Extent(*value[1].tolist())
            target, weight = cut_slice(target, extent), weight * ((extent.end - extent.start) / extent.length)
        try:
            result = loss_fn(output, target)
        except (TypeError, AttributeError) as error:
            if not isinstance(output, Mapping):
                raise
            raise RunError(f"loss_fn: {one_line(error)}. {_fields(output)}") from error
        loss, metrics = separate(result, weight)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError(f"loss_fn returned {shape}: it must return a scalar, the mean over the micro-batch.")
        if not loss.dtype.is_floating_point:
            raise RunError(f"loss_fn returned a {loss.dtype}: a loss must be a floating-point number. Convert it.")
        keep_metrics(batch, key, metrics)
        state.loss_weights[key] = weight
        weighed = loss.detach() * state.seed(weight, loss)
        earlier = batch.losses.get(microbatch)  # of slices
        batch.losses[microbatch] = weighed if earlier is None else earlier + weighed
        return [root_of(loss)] if loss.requires_grad else []

    return finish


def _fields(output: Mapping[str, Value]) -> str:
    """How a loss reads what a model returns."""
    kind, names = type(output), [name for name, value in output.items() if isinstance(value, Tensor)]
    name = "logits" if "logits" in names or not names else names[0]
    read = f"output[{name!r}]" if kind is dict else f"output.{name}"
    return (
        f"The model returns a {kind.__name__} with {', '.join(map(str, output)) or 'nothing'}: use {read} in loss_fn."
    )


def _bind_output(
    state: RankState, action: Action, program: Program, inputs: StageInputs, skips: SkipValues | None
) -> Callable[[Value, Value], list[Root]]:
    """The function that takes a stage's output: passes it to the next stage on this rank, or to its SEND."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    here = program.placement.rank_of(stage + 1, microbatch) == state.wiring.rank
    next_key = (stage + 1, microbatch, piece)
    send = action.with_op(Op.SEND_F)
    departing, arrived = state.departing, state.arrived
    enter = bind_entry(state, stage + 1, not program.schedule.forward_only) if here else None

    def deliver(output: Value, _: Value) -> list[Root]:
        layout, tensors = flatten(output)
        found = _overlapping(tensors, [] if skips is None else skips.leaving(), inputs.overlapping)
        if found:
            layout = with_overlapping(layout, found)
        detached, roots = [], []
        for tensor in tensors:
            detached.append(tensor.detach())
            if tensor.requires_grad:
                roots.append(root_of(tensor))
        if enter is not None:
            arrived[next_key] = enter(layout, detached)
        else:
            departing[send] = (layout, detached)
        return roots

    return deliver


def _overlapping(tensors: list[Tensor], skips: list[Tensor], shared: list[Tensor]) -> list[int]:
    """The positions of tensors of which a change in place may change others, skips, or what `shared` inputs did."""
    if len(tensors) < 2 and not skips and not shared:
        return []
    overlaps = overlapping([*tensors, *skips])
    return [
        index
        for index, one in enumerate(tensors)
        if overlaps[index] or any(one is skip for skip in skips) or any(share_storage(one, other) for other in shared)
    ]


def bind_entry(
    state: RankState, stage: int, training: bool
) -> Callable[[Layout, list[Tensor]], tuple[Value, list[Tensor], tuple[int, ...]]]:
    """The function that makes a stage's input: tensors that require a gradient become leaves of a new graph.

    It returns the value, its leaves, and `Layout.overlapping`.
    """
    copies_input = state.wiring.copies_input

    def enter(layout: Layout, tensors: list[Tensor]) -> tuple[Value, list[Tensor], tuple[int, ...]]:
        if not training:
            return unflatten(layout, tensors), [], layout.overlapping
        leaves = [t.requires_grad_() for t, (_, _, wants) in zip(tensors, layout.specs, strict=True) if wants]
        if copies_input[stage]:
            tensors = [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors]
        return unflatten(layout, tensors), leaves, layout.overlapping

    return enter


def _use_here(wiring: RankWiring, tensors: Sequence[Tensor | None]) -> None:
    """A computation uses tensors that another stage of its rank made in another stream."""
    for tensor in tensors:
        if tensor is not None and tensor.device == wiring.device.device:
            wiring.device.used_here(tensor)


def bind_backward(state: RankState, action: Action, program: Program) -> Step:
    """B, or I, which keeps what its W needs."""
    stage, op, microbatch, piece = action
    assert microbatch is not None
    key, splits, last = (stage, microbatch, piece), op is Op.I, stage == program.schedule.num_stages - 1
    saved, arrived, declared = state.saved, state.gradients, state.declared
    mover = state.wiring.mover if key in state.to_offload else None
    deliver = _bind_gradients(state, action, program) if stage > 0 else None
    come_back, send_back = bind_skip_gradients(state, action, program) if program.skips else (None, None)
    from_other_stream = state.wiring.between_streams(stage, stage + 1)

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
            if from_other_stream:
                _use_here(state.wiring, given)
            if come_back is not None:
                given = [*given, *come_back()]
        starts: list[Root] = []
        gradients: list[Tensor] = []
        for root, gradient in zip(roots, given, strict=True):
            if gradient is not None:
                starts.append(root)
                gradients.append(gradient)
        if key in declared:
            add_declared(state, action, starts, gradients)
        if splits:
            found, saved[key] = backward_input(starts, gradients, leaves)
        else:
            if starts:
                run_backward(tuple(starts), tuple(gradients), False, False, (), True, True)
            del saved[key]
            found = [leaf.grad for leaf in leaves] if leaves else []
        if send_back is not None:
            found = send_back(found)
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


def _bind_gradients(state: RankState, action: Action, program: Program) -> Callable[[Sequence[Tensor | None]], None]:
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
