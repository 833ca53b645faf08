"""Cross-entropy of logits whose vocabulary is cut along an axis: no process has a row of all logits.

    1  all-reduce the maximum of each row
    2  all-reduce the sum of exp(logit - maximum), and the logit of the target, 0 where another process has it
    3  loss = log(sum) - target's logit;  gradient = softmax - one-hot, each process of its own block

(Megatron-LM, arXiv:1909.08053, section 3.) Three numbers per token travel.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function

IGNORED = -100  # as in F.cross_entropy


def token_losses(logits: Tensor, targets: Tensor, axis: Axis, vocabulary_size: int) -> Tensor:
    """Cross-entropy of each token in nats, equal on all members of `axis`.

    Args:
        logits: [..., ceil(vocabulary_size / n)], this member's block. Blocks behind the end are padding, not read.
        targets: [...] token ids of the full vocabulary; -100 where there is no loss.

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
    check_ids(targets, vocabulary_size, "targets", ignored=IGNORED)
    return apply_function(_TokenLosses, logits, targets.long(), axis, vocabulary_size)


def check_ids(ids: Tensor, vocabulary_size: int, what: str, *, ignored: int | None = None) -> None:
    """Raises InputError where an id is outside of the vocabulary: no process would notice, each has a block only."""
    outside = (ids < 0) | (ids >= vocabulary_size)
    if ignored is not None:
        outside &= ids != ignored
    if outside.any():
        wrong = int(ids[outside][0])
        raise InputError(f"{what} have token id {wrong}: must be from 0 to {vocabulary_size - 1}, the vocabulary.")


class _TokenLosses(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, vocabulary_size: int) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        block, start = logits.shape[-1], logits.shape[-1] * axis.index
        padding = max(0, min(block, start + block - vocabulary_size))
        if padding:
            wide = wide.clone()
            wide[..., block - padding :] = -torch.inf
        shifted = wide - axis.all_reduce(wide.amax(-1, keepdim=True), "max")
        owned = (targets >= start) & (targets < start + block)
        places = (targets - start).masked_fill(~owned, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, places).squeeze(-1).masked_fill(~owned, 0.0)
        softmax = shifted.exp_()
        total, of_target = axis.all_reduce(torch.stack([softmax.sum(-1), of_target])).unbind(0)
        counts = targets != IGNORED
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), places, owned, counts)
        return (total.log() - of_target).masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, places, owned, counts = ctx.saved_tensors
        gradient = gradient.masked_fill(~counts, 0.0).unsqueeze(-1)
        found = softmax * gradient
        found.scatter_add_(-1, places, -gradient * owned.unsqueeze(-1))
        return found.to(ctx.dtype), None, None, None
