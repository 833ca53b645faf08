"""Cross-entropy of logits whose vocabulary is cut along an axis: no process has a row of all logits.

    1  all-reduce the maximum of each row
    2  all-reduce the sum of exp(logit - maximum), and the logit of the target, 0 where another process has it
    3  loss = log(sum) - target's logit;  gradient = softmax - one-hot, each process of its own block

(Megatron-LM, arXiv:1909.08053, section 3.) Three numbers per token travel. The backward keeps the logits, not
a copy, and one number per token. Exponentials exist for a few rows at a time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function

IGNORED = -100  # as in F.cross_entropy
_CHUNK_ELEMENTS = 1 << 20  # of logits whose exponentials exist at a time


def token_losses(
    logits: Tensor, targets: Tensor, axis: Axis, vocabulary_size: int, *, ignored: int = IGNORED
) -> Tensor:
    """Cross-entropy of each token in nats, equal on all members of `axis`.

    Args:
        logits: [..., ceil(vocabulary_size / n)], this member's block. Blocks behind the end are padding, not read.
        targets: [...] token ids of the full vocabulary; `ignored` where there is no loss.

    Returns:
        [...] in the dtype of the logits, at least float32; 0 where there is no loss.

    Raises:
        InputError: a target is outside of the vocabulary.
    """
    block = logits.shape[-1]
    if block != -(-vocabulary_size // axis.degree):
        raise InputError(
            f"logits of {block} token ids on axis {axis}: must be {-(-vocabulary_size // axis.degree)}, for a "
            f"vocabulary of {vocabulary_size}. Pass the output of the model."
        )
    check_ids(targets, vocabulary_size, "targets", ignored=ignored)
    valid = max(0, min(block, vocabulary_size - block * axis.index))
    losses = apply_function(_TokenLosses, logits.flatten(0, -2), targets.flatten().long(), axis, valid, ignored)
    return losses.view(targets.shape)


def check_ids(ids: Tensor, vocabulary_size: int, what: str, *, ignored: int | None = None) -> None:
    """Raises InputError where an id is outside of the vocabulary: no process would notice, each has a block only."""
    outside = (ids < 0) | (ids >= vocabulary_size)
    if ignored is not None:
        outside &= ids != ignored
    if outside.any():
        wrong = int(ids[outside][0])
        raise InputError(f"{what} have token id {wrong}: must be from 0 to {vocabulary_size - 1}, the vocabulary.")


class _TokenLosses(Function):
    """Logits [N, block], of which `valid` are of the vocabulary, and targets [N] -> losses [N]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, valid: int, ignored: int) -> Tensor:
        start, own = logits.shape[1] * axis.index, logits[:, :valid]
        wide = torch.promote_types(logits.dtype, torch.float32)
        if valid:
            greatest = own.amax(1).to(wide)
        else:  # all of the block is padding
            greatest = logits.new_full(targets.shape, -torch.inf, dtype=wide)
        greatest = axis.all_reduce(greatest, "max")
        owned = (targets >= start) & (targets < start + valid)
        places = (targets - start).masked_fill_(~owned, 0)
        of_target = logits.gather(1, places.unsqueeze(1)).squeeze(1).to(wide) - greatest
        sums = torch.zeros_like(greatest)
        for rows in _chunks(*logits.shape):
            sums[rows] = (own[rows].to(wide) - greatest[rows, None]).exp_().sum(1)
        total, of_target = axis.all_reduce(torch.stack([sums, of_target.masked_fill_(~owned, 0.0)])).unbind(0)
        scale = total.log()
        counts = targets != ignored
        ctx.valid = valid
        ctx.save_for_backward(logits, scale + greatest, places, owned & counts, counts)
        return (scale - of_target).masked_fill_(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, scale, places, owned, counts = ctx.saved_tensors
        valid = ctx.valid
        gradient = gradient.masked_fill(~counts, 0.0).unsqueeze(1)
        found = torch.zeros_like(logits) if valid < logits.shape[1] else torch.empty_like(logits)
        for rows in _chunks(*logits.shape):
            values = (logits[rows, :valid].to(scale.dtype) - scale[rows, None]).exp_().mul_(gradient[rows])
            if valid:
                values.scatter_add_(1, places[rows, None], -gradient[rows] * owned[rows, None])
            found[rows, :valid] = values
            del values  # before the next ones are made
        return found, None, None, None, None


def _chunks(tokens: int, block: int) -> list[slice]:
    """Rows of logits, so many at a time that their exponentials take little memory."""
    step = max(1, _CHUNK_ELEMENTS // max(block, 1))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
