"""Layers of pipeloom's GPT: parameters, and what a forward keeps for the backward, in closed form.

For T tokens per micro-batch, width W, H heads, sequences of S tokens, vocabulary V, an MLP of width r W and numbers of
e bytes, a forward keeps (Korthikanti et al., arXiv:2205.05198, section 4, counted anew for this model: torch's fused
attention, no biases, GELU from its input), in bytes:

    embedding   8 T                                                 token ids
    block       (8 + 2 r) e T W + 4 e T + 4 T H                     inputs of norms, matrices, attention and GELU
      dropout   (7 + 2 r) e T W + 4 e T + 12 T W + 12 T S H         attention in float32, its weights kept three times
      selective (8 + 2 r) e T W + 4 e T                             of attention q, k and v; with dropout 2 e T W more
      full      e T W                                               the block's input
    norm        e T W + 2 e T
    head        e T W + 4 T V + 8 T + 4                             its input; logarithms of probabilities; targets

A tensor that several operations keep counts once. Dropout keeps another e T W behind the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom.ir.recompute import Recompute
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.plan.memory.memory_model import LayerMemory


def gpt_layers(sizes: GPTConfig, samples: float, number_bytes: int) -> list[LayerMemory]:
    """All layers of a GPT, first to last.

    Args:
        sizes: of the model.
        samples: per micro-batch.
        number_bytes: bytes of a number in forwards, e above.
    """
    tokens = samples * sizes.sequence_length
    width, vocabulary, ratio = sizes.width, sizes.vocabulary_size, sizes.mlp_ratio
    whole = number_bytes * tokens * width  # of a tensor of the residual stream
    table = {"embedding.weight": (vocabulary, width)}
    if sizes.positions == "learned":
        table["embedding.positions"] = (sizes.sequence_length, width)
    matrices = {
        "attention_norm": (width,),
        "qkv": (3 * width, width),
        "attention_out": (width, width),
        "mlp_norm": (width,),
        "mlp_up": (ratio * width, width),
        "mlp_down": (width, ratio * width),
    }
    block = _block_bytes(sizes, tokens, number_bytes)
    rotary = 0 if sizes.positions == "learned" else 6 * sizes.sequence_length * width // sizes.heads
    # Of 2 (4 + 2 r) W**2 + 2 S W operations per token and block, causal attention has the last part.
    attention = sizes.sequence_length / ((2 + ratio) * 2 * width + sizes.sequence_length)
    share = {Recompute.NONE: 0.0, Recompute.SELECTIVE: attention, Recompute.FULL: 1.0}
    head = "embedding.weight" if sizes.tie_embeddings else "head.weight"
    return [
        _layer("embedding", table, 8 * tokens + whole * (sizes.dropout > 0)),
        *(
            LayerMemory(
                name=f"blocks.{index}",
                parameters={f"blocks.{index}.{name}.weight": shape for name, shape in matrices.items()},
                kept_bytes=block,
                buffer_elements=rotary,
                is_block=True,
                recompute_share=share,
            )
            for index in range(sizes.layers)
        ),
        _layer("norm", {"norm.weight": (width,)}, whole + 2 * number_bytes * tokens),
        _layer("head", {head: (vocabulary, width)}, whole + 4 * tokens * vocabulary + 8 * tokens + 4),
    ]


def _block_bytes(sizes: GPTConfig, tokens: float, number_bytes: int) -> dict[Recompute, float]:
    whole = number_bytes * tokens * sizes.width
    selective = (8 + 2 * sizes.mlp_ratio + 2 * (sizes.dropout > 0)) * whole + 4 * number_bytes * tokens
    if sizes.dropout:  # instead of q, k and v: copies of them and three tables of weights, in float32
        scores = tokens * sizes.sequence_length * sizes.heads
        everything = selective - 3 * whole + 3 * 4 * (tokens * sizes.width + scores)
    else:
        everything = selective + 4 * tokens * sizes.heads
    return {Recompute.NONE: everything, Recompute.SELECTIVE: selective, Recompute.FULL: whole}


def _layer(name: str, parameters: Mapping[str, tuple[int, ...]], kept: float) -> LayerMemory:
    return LayerMemory(
        name=name,
        parameters=parameters,
        kept_bytes=dict.fromkeys(Recompute, kept),
        recompute_share=dict.fromkeys(Recompute, 0.0),
    )
