"""What the slices of a sequence keep (`pipeloom.slicing`), in closed form. No torch.

With the letters of `transformer_layers`, a block in k slices keeps, in place of its part of keys and values:

    keys and values  2 K / H e T W of all tokens, from F of the first slice to its backward, also of recomputed blocks
    their gradients  (1 - 1/k) of these numbers, in float32 or wider, from the backward of the last slice (the first
                     backward) to that of the first
    scores           without fused attention, or with dropout: slice i of k has (i + 1) / k**2 of all S x S scores
    output           with K < H, a copy of attention's output

Dropout keeps masks of one byte per number, and of every score its softmax, a mask, and what dropout leaves. Not
counted: masks of slices that are no multiples of 32 tokens, which keep those of whole blocks; copies of keys and
values for all heads where K < H and weights are dropped; on the CPU, another copy of attention's output behind the
first slice.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.software import Software


class SliceBytes(NamedTuple):
    """Bytes of one layer of a micro-batch that runs in slices.

    Attributes:
        keys_values: of all slices together.
        gradients: of keys and values of all tokens.
        kept: for each kind of recomputation, what all slices keep of their own, without scores.
        scores: for each kind of recomputation, of all S x S scores.
    """

    keys_values: float
    gradients: float
    kept: Mapping[Recompute, float]
    scores: Mapping[Recompute, float]

    def of_slice(self, recompute: Recompute, index: int, count: int) -> float:
        """What slice `index` of `count` equal ones keeps of its own."""
        return self.kept[recompute] / count + self.scores[recompute] * (index + 1) / count**2

    def at_end(self, count: int) -> float:
        """Gradients of keys and values behind the backward of the last of `count` slices."""
        return self.gradients * (1 - 1 / count)


def block_slices(
    model: Architecture,
    kept: Mapping[Recompute, float],
    *,
    samples: float,
    number_bytes: int,
    inside: InsideStage,
    software: Software,
) -> SliceBytes:
    """The bytes that a block keeps per slice, from those that it keeps without slices."""
    tokens = samples * model.sequence_length / inside.sample_parts
    heads = model.heads // inside.head_parts
    of_head = number_bytes * tokens * model.head_width
    keys_values = 2 * inside.key_heads(model.key_heads) * of_head
    scores, per_score, other = tokens * model.sequence_length * heads, 0.0, 0.0
    dropout, masks = max(model.dropout, software.dropout) > 0, 0.0
    if not software.fused_attention:
        per_score = number_bytes * (1 + dropout) + dropout
        other = -scores * per_score
    elif not dropout:
        other = heads * of_head if model.key_heads < model.heads else 0.0
    else:
        per_score = 2 * number_bytes + 1 + 1 / (samples * heads)  # the causal mask is of all samples and heads
        other = heads * of_head + keys_values - 12 * (tokens * model.head_width * heads + scores)
        masks = 2 * wider_masks(model, samples=samples, number_bytes=number_bytes, inside=inside)
    own = {
        Recompute.NONE: kept[Recompute.NONE] - keys_values + other - masks,
        Recompute.SELECTIVE: kept[Recompute.SELECTIVE] - keys_values - masks,
        Recompute.FULL: kept[Recompute.FULL],
    }
    of_scores = dict.fromkeys(Recompute, 0.0) | {Recompute.NONE: scores * per_score}
    return SliceBytes(keys_values, keys_values * max(1.0, 4 / number_bytes), own, of_scores)


def wider_masks(model: Architecture, *, samples: float, number_bytes: int, inside: InsideStage) -> float:
    """Bytes by which a mask of dropout is larger without slices, where it has numbers and not bytes."""
    tokens = samples * model.sequence_length / inside.sample_parts / (inside.tensor if inside.sequence else 1)
    side = 1 if inside.grid is None else inside.grid.side
    return (number_bytes - 1) * tokens * model.width / side
