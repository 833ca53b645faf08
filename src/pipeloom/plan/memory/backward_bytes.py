"""What the backward of a layer holds beside what its forward kept, in closed form. No torch.

With the letters of `transformer_layers`, F the width of a block's MLP, D = e T W the gradient between two layers, and L
= 4 T V the logits in float32, the loss too under bf16 and fp16:

    head        2 L                     gradients of the loss by logarithms of probabilities, and by logits
                e/4 L - L + D           then both and the logarithms are gone; the weight's gradient is computed
                - L                     then the logits' gradient is gone too; the weight's is converted
    norm        2 D                     gradients of its output and of its input
    block       D + e T F               gradient of mlp_down's input; its weight's is computed
                D + 2 e T F             gated only: gradients of both factors
                2 D - e T F             GELU's input and output are gone; gradients of mlp_up; gated 3 D - 2 e T F
                attention               all of the MLP is gone; the larger of gradients of queries (also 4 bytes per
                                        number where e < 4), keys and values, and twice those of their rotation
                qkv                     all but the block's input and its norm is gone
    embedding   D                       its weight's gradient is computed, then converted

With a vocabulary that processes share, the first is L, in e bytes per number, and exponentials of a few rows. With
experts, e T F has their rows, A in place of T; gradients of these rows take the place of the results before they are
weighted. Attention that is not fused has the gradient of its scores, in place of its output. Gradients of weights come
on top: in e bytes per number while they are computed, and where sums of gradients have another format, once more in
that format.
"""

from collections.abc import Sequence
from typing import NamedTuple

CHUNK_ELEMENTS = 1 << 20  # whose exponentials exist at a time (`pipeloom.parallel.tensor.cross_entropy`)


class BackwardMoment(NamedTuple):
    """A moment of a layer's backward.

    Attributes:
        size: bytes beside all that the layer's forward kept, or recomputed; less than 0 where more of that is gone.
        made: elements of the layer's parameters whose gradients this backward has computed before.
        making: elements whose gradients exist in the format of forwards.
        summing: elements whose gradients exist in the format of sums too, before they are added, if it is another.
        grouped: whether `making` are matrices of experts, whose products add to the sum themselves
            (`pipeloom.autograd.grouped_linear`).
    """

    size: float
    made: int = 0
    making: int = 0
    summing: int = 0
    grouped: bool = False


class BlockSizes(NamedTuple):
    """Bytes on one process that a block's moments need.

    Attributes:
        gradient: of the gradient between layers.
        inner: of the MLP's inner tensor.
        mlp: that the MLP's forward kept, with its input and the input of its norm.
        queries, keys_values: of attention.
        widened: of the queries in float32, where forwards have 16 bits; else 0.
        scores: of the gradient of scores, where attention is not fused; else 0.
        kept: that the forward kept.
    """

    gradient: float
    inner: float
    mlp: float
    queries: float
    keys_values: float
    widened: float
    scores: float
    kept: float


def block_moments(
    sizes: BlockSizes, *, gated: bool, grouped: bool, down: int, up: int, attention_out: int, qkv: int
) -> list[BackwardMoment]:
    """The moments of a block's backward.

    Args:
        sizes: of the block.
        gated: whether its MLP or experts are gated.
        grouped: whether it has experts.
        down, up, attention_out, qkv: elements of these matrices.
    """
    start = sizes.gradient
    found = [BackwardMoment(start + sizes.inner, making=down, grouped=grouped)]
    found.append(BackwardMoment(start, making=down, summing=down, grouped=grouped))
    if gated:
        found.append(BackwardMoment(start + 2 * sizes.inner, made=down))
        end = 3 * sizes.gradient - 2 * sizes.inner
    else:
        found.append(BackwardMoment(2 * sizes.gradient - sizes.inner, made=down, making=up, grouped=grouped))
        end = 2 * sizes.gradient - 2 * sizes.inner
    found.append(BackwardMoment(end, made=down, making=up, summing=up, grouped=grouped))
    fused = sizes.queries + sizes.keys_values
    kernel, rotation = fused + sizes.queries + sizes.widened, 2 * fused - sizes.queries
    if sizes.scores:
        kernel = sizes.scores - sizes.queries
    attention = sizes.gradient - sizes.mlp + max(kernel, rotation)
    made = down + up + attention_out
    found.append(BackwardMoment(attention, made=made))
    found.append(BackwardMoment(4 * sizes.gradient + fused - sizes.kept, made=made, making=qkv))
    return found


def head_moments(
    logits: float, number_bytes: int, gradient: float, elements: int, *, shared: bool
) -> Sequence[BackwardMoment]:
    """The moments of the backward of the head and the loss.

    Args:
        logits: number of logits of this process.
        number_bytes: of a number in forwards.
        gradient: bytes of the gradient between layers.
        elements: of the head's weight.
        shared: whether processes share the vocabulary.
    """
    wide = 4 * logits
    return (
        BackwardMoment(number_bytes * logits + 4 * min(logits, CHUNK_ELEMENTS) if shared else 2 * wide),
        BackwardMoment(number_bytes * logits - wide + gradient, making=elements),
        BackwardMoment(-wide, making=elements, summing=elements),
    )
