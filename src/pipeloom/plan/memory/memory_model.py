"""`MemoryModel`: the layers of a model, and how they are trained, as memory forecasts need them; layers of a GPT.

For T tokens per micro-batch, width W, H heads, sequences of S tokens, vocabulary V, an MLP of width r W and numbers of
e bytes, a forward of pipeloom's GPT keeps (Korthikanti et al., arXiv:2205.05198, section 4, counted anew for this
model: torch's fused attention, no biases, GELU from its input), in bytes:

    embedding   8 T                                                 token ids
    block       (8 + 2 r) e T W + 4 e T + 4 T H                     inputs of norms, matrices, attention and GELU
      dropout   (7 + 2 r) e T W + 4 e T + 12 T W + 12 T S H         attention in float32, its weights kept three times
      selective (8 + 2 r) e T W + 4 e T                             of attention q, k and v; with dropout 2 e T W more
      full      e T W                                               the block's input
    norm        e T W + 2 e T
    head        e T W + 4 T V + 8 T + 4                             its input; logarithms of probabilities; targets

A tensor that several operations keep counts once. Dropout keeps another e T W behind the embedding. With K key
heads, k and v take 2 K / H e T W in place of 2 e T W.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from pipeloom.ir.recompute import Recompute
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.parallel.options import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer of a model.

    Attributes:
        name: fully qualified.
        parameters: shapes by canonical name; layers that name the same parameter share it.
        kept_bytes: for each kind of recomputation, bytes that F of one micro-batch keeps.
        buffer_elements: elements of buffers.
        is_block: whether it is one of the repeated layers: those that are recomputed, and whose matrices Muon updates.
        recompute_share: for each kind of recomputation, the share of the forward that is computed again.
    """

    name: str
    parameters: Mapping[str, tuple[int, ...]]
    kept_bytes: Mapping[Recompute, float]
    buffer_elements: int = 0
    is_block: bool = False
    recompute_share: Mapping[Recompute, float]

    @property
    def parameter_sizes(self) -> dict[str, int]:
        """Elements of each parameter, by canonical name."""
        return {name: math.prod(shape) for name, shape in self.parameters.items()}


def num_parameters(layers: Iterable[LayerMemory]) -> int:
    """Elements of the parameters of these layers; a shared parameter counts once."""
    return sum({name: size for layer in layers for name, size in layer.parameter_sizes.items()}.values())


def in_stages(layers: list[LayerMemory], blocks: list[int]) -> list[list[LayerMemory]]:
    """Cut layers into stages with these numbers of blocks; other layers go with the first and the last block."""
    at = [index for index, layer in enumerate(layers) if layer.is_block]
    ends = (at[done] if done < len(at) else len(layers) for done in accumulate(blocks))
    return [layers[start:end] for start, end in pairwise([0, *ends])]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """The model whose memory is predicted.

    Attributes:
        stages: the layers of every stage.
        precision: number formats.
        optimizer: a name of `pipeloom.plan.memory.state_bytes.OPTIMIZERS`.
        recompute: the kind of recomputation of every stage; empty: none.
        whole_parameters: whether replicas own full parameters instead of shards (`pipeloom.DataParallel.layout`).
        elsewhere: the kinds of `KINDS` that are offloaded while they are not used.
        bucket_bytes: as in `pipeloom.DataParallel`.
    """

    stages: Sequence[Sequence[LayerMemory]]
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    recompute: Sequence[Recompute] = ()
    whole_parameters: bool = False
    elsewhere: frozenset[str] = frozenset()
    bucket_bytes: int = BUCKET_BYTES

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage] if self.recompute else Recompute.NONE

    def kept_bytes(self, stage: int) -> float:
        """Bytes that F of one micro-batch keeps."""
        return sum(layer.kept_bytes[self.recompute_of(stage)] for layer in self.stages[stage])

    def recomputed_bytes(self, stage: int) -> float:
        """Bytes of activations that a backward recomputes at once: those of the largest layer."""
        kind = self.recompute_of(stage)
        return max(layer.kept_bytes[Recompute.NONE] - layer.kept_bytes[kind] for layer in self.stages[stage])

    def recompute_share(self, stage: int) -> float:
        """The share of the stage's blocks that is recomputed."""
        blocks = [layer.recompute_share[self.recompute_of(stage)] for layer in self.stages[stage] if layer.is_block]
        return sum(blocks) / len(blocks) if blocks else 0.0


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
        "qkv": (sum(rows for rows, _ in sizes.qkv_sections), width),
        "attention_out": (width, width),
        "mlp_norm": (width,),
        "mlp_up": (ratio * width, width),
        "mlp_down": (width, ratio * width),
    }
    rows_qkv = sum(rows for rows, _ in sizes.qkv_sections)
    keys_values = 2 * whole * sizes.key_heads / sizes.heads
    selective = (6 + 2 * ratio + 2 * (sizes.dropout > 0)) * whole + keys_values + 4 * number_bytes * tokens
    if sizes.dropout:  # instead of q, k and v: copies of them for all heads and three tables of weights, in float32
        scores = tokens * sizes.sequence_length * sizes.heads
        everything = selective - whole - keys_values + 3 * 4 * (tokens * width + scores)
    else:
        everything = selective + 4 * tokens * sizes.heads
    block = {Recompute.NONE: everything, Recompute.SELECTIVE: selective, Recompute.FULL: whole}
    rotary = 0 if sizes.positions == "learned" else 6 * sizes.sequence_length * width // sizes.heads
    # Of 2 (4 + 2 r) W**2 + 2 S W operations per token and block, causal attention has the last part.
    attention = sizes.sequence_length / ((1 + 2 * ratio) * width + rows_qkv + sizes.sequence_length)
    share = {Recompute.NONE: 0.0, Recompute.SELECTIVE: attention, Recompute.FULL: 1.0}
    head = "embedding.weight" if sizes.tie_embeddings else "head.weight"

    def layer(name: str, parameters: Mapping[str, tuple[int, ...]], kept: float) -> LayerMemory:
        kinds, none = dict.fromkeys(Recompute, kept), dict.fromkeys(Recompute, 0.0)
        return LayerMemory(name=name, parameters=parameters, kept_bytes=kinds, recompute_share=none)

    return [
        layer("embedding", table, 8 * tokens + whole * (sizes.dropout > 0)),
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
        layer("norm", {"norm.weight": (width,)}, whole + 2 * number_bytes * tokens),
        layer("head", {head: (vocabulary, width)}, whole + 4 * tokens * vocabulary + 8 * tokens + 4),
    ]
