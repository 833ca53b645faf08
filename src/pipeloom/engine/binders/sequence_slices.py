"""Slices of a sequence: what F, B and I do in addition.

    stage 0        cut the slice from its micro-batch
    other stages   receive (value, extent): the start and end of the slice, and the length of the sequence
    F, B, I        run inside the slice's context, in which attention finds the keys and values of earlier slices
    last stage     cut the targets by the same extent; weight the loss by the slice's share of the sequence

A context belongs to one stage and micro-batch. It exists from the forward of slice 0 to the backward of slice 0, which
comes last; in evaluation to the forward of the last slice.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from pipeloom.common.division import even_parts
from pipeloom.engine.batch import Batch, Extent
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.errors import InputError, listed
from pipeloom.ir import Action, Program
from pipeloom.slicing import RefuseRawAttention, SliceContext
from pipeloom.transport.values import Value, flatten, unflatten, with_form


def slice_extents(length: int, num_slices: int, lengths: Sequence[int] | None) -> list[Extent]:
    """Cut a sequence in proportion to `lengths`; without these evenly, longer slices first.

    Raises:
        InputError: fewer tokens than slices.
    """
    if length < num_slices:
        raise InputError(
            f"a sequence of {length} tokens for {num_slices} slices: each slice needs at least one token. Use longer "
            f"sequences, or a schedule of {max(1, length)} slices."
        )
    if lengths is None:
        ends = list(accumulate(even_parts(length, num_slices)))
    else:
        whole = sum(lengths)
        ends = [round(end * length / whole) for end in accumulate(lengths)]
        for index in range(num_slices):  # every slice keeps a token however short the sequence is
            ends[index] = max(ends[index], index + 1)
            ends[index] = min(ends[index], length - (num_slices - 1 - index))
    return [Extent(start, end, length) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def cut_sequences(batch: Batch, num_slices: int, lengths: Sequence[int] | None) -> None:
    """Set the extents of a batch's slices.

    Raises:
        InputError: no sequences, sequences shorter than the number of slices, or sequences of different length.
    """
    found: dict[str, int] = {}
    for what, values in (("inputs", batch.inputs), ("targets", batch.targets)):
        if not values:
            continue
        tokens = {tensor.shape[1] for tensor in flatten(values[0])[1] if tensor.dim() > 1}
        if len(tokens) != 1:
            if not tokens:
                raise InputError(
                    f"{what} hold no tensor of two dimensions or more: slices cut dimension 1, the tokens. Pass "
                    "tensors of shape (samples, tokens, ...), or use a schedule without slices."
                )
            raise InputError(
                f"{what} hold tensors of {listed(sorted(tokens))} along dimension 1: slices cut this dimension, the "
                "tokens, so it must be equal in all tensors. Pad the sequences, or use a schedule without slices."
            )
        (found[what],) = tokens
        batch.extents = slice_extents(found[what], num_slices, lengths)
    if len(set(found.values())) > 1:
        raise InputError(
            f"inputs are sequences of {found['inputs']} tokens and targets of {found['targets']}: every token needs a "
            "target. Pass sequences of the same length."
        )


def cut_slice(value: Value, extent: Extent) -> Value:
    """The slice of a micro-batch; every slice gets tensors of one dimension whole."""
    layout, tensors = flatten(value)
    start, end, _ = extent
    return unflatten(layout, [t[:, start:end] if t.dim() > 1 else t for t in tensors])


def join_slices(values: Sequence[Value]) -> Value:
    """Concatenate the outputs of slices along dimension 1; other tensors are those of the last slice."""
    layouts, tensors = zip(*map(partial(flatten, repeated=True), values), strict=True)
    joined = [torch.cat(column, 1) if column[0].dim() > 1 else column[-1] for column in zip(*tensors, strict=True)]
    return with_form(unflatten(layouts[-1], joined), values[-1])


def sliced_module(
    state: RankState, action: Action, program: Program, forward: Callable[[Value], Value]
) -> Callable[[Value], Value]:
    """The function that F of a slice calls: (value, extent) -> (value, extent); on stage 0 it takes a micro-batch.

    `forward` is the function that F of a whole sequence calls.
    """
    stage, _, microbatch, _ = action
    assert microbatch is not None
    module, contexts, extents = state.wiring.stages[stage], state.contexts, state.extents
    key, context_key, num_slices = (stage, microbatch, action.slice), (stage, microbatch), program.schedule.num_slices
    piece = action.slice or 0
    first, last_slice = stage == 0, piece == num_slices - 1
    forward_only = program.schedule.forward_only
    to_check = piece > 0 and microbatch == 0  # only in the first step: the check takes time

    def run(value: Value) -> tuple[Value, Tensor]:
        if first:
            extent = state.batch.extents[piece]
            value, mark = cut_slice(value, extent), torch.tensor(extent)
        else:
            value, mark = value
            extent = Extent(*mark.tolist())
        nonlocal to_check
        watch = RefuseRawAttention(module) if to_check else nullcontext()
        to_check = False
        extents[key] = extent
        if piece == 0:
            seed = state.batch.seed
            contexts[context_key] = SliceContext(None if seed is None else (seed, stage, microbatch))
        with contexts[context_key].slice(piece, *extent), watch:
            output = forward(value)
        if forward_only:
            del extents[key]
            if last_slice:
                contexts.pop(context_key).close()
        return output, mark

    return run


def in_slice(state: RankState, action: Action, step: Step) -> Step:
    """A backward inside its slice's context, in which recomputed blocks find the same keys and values."""
    stage, _, microbatch, _ = action
    assert microbatch is not None
    run, ready = step
    contexts, extents = state.contexts, state.extents
    key, piece = (stage, microbatch, action.slice), action.slice or 0

    def backward() -> None:
        with contexts[stage, microbatch].slice(piece, *extents.pop(key)):
            run()
        if piece == 0:
            contexts.pop((stage, microbatch)).close()

    return backward, ready
