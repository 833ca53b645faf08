"""Layers of a transformer: their parameters on one process of a stage, and what a forward keeps there. No torch.

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
heads, k and v take 2 K / H e T W in place of 2 e T W. An RMS norm keeps one number per token in place of two, a gated
MLP four tensors of its width in place of two.

Processes that share a stage divide this. Per process of n context-parallel ones, T is T / n. Of a block without
recomputation:

    1d of t       4 e T W + 4 e T  +  ((4 + 2 r) e T W + 4 T H) / t
    + sequence    all of it / t
    grid of p     all of it / p; a norm's two numbers have at least 4 bytes
    ulysses       e T W / t more: attention's output before and after its exchange
    ring                   e T W / t more where 1 < K / t < H / t: the output in the order of heads
    ring self-attention    e T S H / t, the weights, in place of 4 T H / t

Software that does not fuse attention keeps, in 16 bits and with dropout, s b h (34 + 5 a s / h) of a block (the same
paper, equation 2): of every score its softmax, a mask of one byte, and what dropout leaves; MLP inputs before and after
GELU; and masks of one byte.

The parts of a vocabulary of V' ids keep 4 T V' + 14 T + 8 in the head, and T more in the embedding. `expert_bytes` has
the bytes of a layer of experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.software import PIPELOOM, Software
from pipeloom.plan.memory.backward_bytes import BackwardMoment, BlockSizes, block_moments, head_moments
from pipeloom.plan.memory.expert_bytes import expert_bytes
from pipeloom.plan.memory.memory_model import LayerMemory
from pipeloom.plan.memory.parameter_shapes import ParameterShapes
from pipeloom.plan.memory.slice_bytes import SliceBytes, block_slices

_EXPERT_PARAMETERS = frozenset(("experts.up", "experts.gate_up", "experts.down"))


def gpt_layers(
    sizes: GPTConfig, samples: float, number_bytes: int, inside: InsideStage | None = None
) -> list[LayerMemory]:
    """All layers of pipeloom's GPT, first to last; see `transformer_layers`."""
    return transformer_layers(Architecture.of_gpt(sizes), samples, number_bytes, inside)


def transformer_layers(
    model: Architecture,
    samples: float,
    number_bytes: int,
    inside: InsideStage | None = None,
    imbalance: float = 1.0,
    software: Software = PIPELOOM,
) -> list[LayerMemory]:
    """All layers, first to last, on one process of each stage.

    Args:
        model: the sizes.
        samples: per micro-batch, all processes of a stage together.
        number_bytes: bytes of a number in forwards, e above.
        inside: the processes of a stage; None: one.
        imbalance: load of the busiest expert-parallel process over the mean load; the bytes are that process's.
        software: what computes.
    """
    inside = inside or InsideStage()
    kept = _Kept(model, samples, number_bytes, inside, imbalance, software)
    shapes, stream = ParameterShapes(model, inside), kept.stream
    head = {"embedding.weight" if model.tie_embeddings else "head.weight": shapes.table}

    def layer(
        name: str, parameters: Mapping[str, tuple[int, ...]], size: float, backward: Sequence[BackwardMoment]
    ) -> LayerMemory:
        kinds, none = dict.fromkeys(Recompute, size), dict.fromkeys(Recompute, 0.0)
        return LayerMemory(name=name, parameters=parameters, kept_bytes=kinds, recompute_share=none, backward=backward)

    with_experts = {model.has_experts(index) for index in range(model.layers)}
    kinds = {experts: _block_of(kept, shapes, experts=experts) for experts in with_experts}
    table = math.prod(shapes.table)
    backward = [BackwardMoment(stream, making=table, summing=table)]
    embedding = layer("embedding", {"embedding.weight": shapes.table} | shapes.positions, kept.embedding(), backward)
    last = layer("head", head, kept.head(), kept.head_backward(table))
    return [
        replace(embedding, slices=kept.embedding_slices()),
        *(_block_layer(index, kinds[model.has_experts(index)], kept) for index in range(model.layers)),
        layer(
            "norm",
            {f"norm.{name}": shape for name, shape in shapes.norm.items()},
            kept.norm(),
            [BackwardMoment(2 * stream)],
        ),
        replace(last, forward_bytes=kept.logits * (4 + (number_bytes if number_bytes < 4 else 0))),
    ]


def kept_of_kinds(
    model: Architecture, samples: float, number_bytes: int, inside: InsideStage, imbalance: float, software: Software
) -> tuple[float, dict[bool, dict[Recompute, float]], float]:
    """Bytes that F keeps of the embedding, of blocks without and with experts, and of norm and head together.

    They are those of `transformer_layers`, which has the arguments.
    """
    kept = _Kept(model, samples, number_bytes, inside, imbalance, software)
    kinds = {model.has_experts(index) for index in range(model.kinds)}
    blocks = {experts: {kind: kept.block(kind, experts=experts) for kind in Recompute} for experts in kinds}
    return kept.embedding(), blocks, kept.norm() + kept.head()


class _Block(NamedTuple):
    """What equal blocks have in common."""

    experts: bool
    parameters: dict[str, tuple[int, ...]]
    kept_bytes: dict[Recompute, float]
    recompute_share: dict[Recompute, float]
    backward: Sequence[BackwardMoment]
    slices: SliceBytes | None


def _block_of(kept: "_Kept", shapes: ParameterShapes, *, experts: bool) -> _Block:
    model, inside, parameters = kept.model, kept.inside, shapes.block(experts=experts)
    kept_bytes = {kind: kept.block(kind, experts=experts) for kind in Recompute}
    slices = None
    if inside.context == 1:
        slices = block_slices(
            model,
            kept_bytes,
            samples=kept.samples,
            number_bytes=kept.number_bytes,
            inside=inside,
            software=kept.software,
        )
    backward = kept.block_backward(parameters, experts=experts)
    return _Block(experts, parameters, kept_bytes, recompute_shares(model, experts=experts), backward, slices)


def _block_layer(index: int, block: _Block, kept: "_Kept") -> LayerMemory:
    model = kept.model
    rotary = 6 * model.sequence_length * model.head_width if model.positions == "rotary" else 0
    biases = model.experts.buffers if block.experts and model.experts is not None else 0
    names = {name: f"blocks.{index}.{name}" for name in block.parameters}
    return LayerMemory(
        name=f"blocks.{index}",
        parameters={names[name]: shape for name, shape in block.parameters.items()},
        kept_bytes=block.kept_bytes,
        buffer_elements=rotary + biases,
        is_block=True,
        recompute_share=block.recompute_share,
        expert_parameters=frozenset(names[name] for name in names.keys() & _EXPERT_PARAMETERS),
        slices=block.slices,
        forward_bytes=3 * kept.stream,
        backward=block.backward,
        deferred_bytes=block.kept_bytes[Recompute.NONE],
    )


def recompute_shares(model: Architecture, *, experts: bool) -> dict[Recompute, float]:
    """The share of a block's forward that each kind of recomputation repeats. Causal attention has 2 S W per token."""
    attention = model.sequence_length * model.attention_width
    matrices = model.block_numbers(experts=experts)
    return {Recompute.NONE: 0.0, Recompute.SELECTIVE: attention / (attention + matrices), Recompute.FULL: 1.0}


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that forwards of layers keep on one process."""

    model: Architecture
    samples: float
    number_bytes: int
    inside: InsideStage
    imbalance: float
    software: Software

    @property
    def _dropout(self) -> bool:
        return max(self.model.dropout, self.software.dropout) > 0

    @property
    def _mask(self) -> float:
        """Bytes of a mask of the residual stream."""
        unfused = not self.software.fused_attention
        return (self.stream / self.number_bytes if unfused else self.stream) * self._dropout

    @property
    def _tokens(self) -> float:
        """Tokens of this process in layers that processes share."""
        return self.samples * self.model.sequence_length / self.inside.context / self.inside.sample_parts

    @property
    def _stream_tokens(self) -> float:
        """Tokens of this process between such layers."""
        return self._tokens / (self.inside.tensor if self.inside.sequence else 1)

    @property
    def stream(self) -> float:
        """Bytes of a tensor of the residual stream."""
        parts = 1 if self.inside.grid is None else self.inside.grid.side
        return self.number_bytes * self._stream_tokens * self.model.width / parts

    @property
    def _norm_numbers(self) -> float:
        wide = self.number_bytes if self.inside.grid is None else max(4, self.number_bytes)
        return (2 if self.model.norm == "layer" else 1) * wide * self._stream_tokens

    def embedding(self) -> float:
        tokens = self.samples * self.model.sequence_length / self.inside.context
        if self.inside.layout == "2.5d":  # a layer of the grid looks up its own tokens
            tokens /= self.inside.depth or 1
        ids = (9 if self.inside.tensor > 1 else 8) * tokens
        if self.inside.context > 1 and self.model.positions == "learned":  # which rows of the table are here
            ids += 8 * self.model.sequence_length / self.inside.context
        return ids + self._mask

    def embedding_slices(self) -> SliceBytes:
        """The bytes of the embedding per slice: there a dropout mask has one byte per element."""
        own = self.embedding() - self._mask + self.stream / self.number_bytes * self._dropout
        return SliceBytes(0.0, 0.0, dict.fromkeys(Recompute, own), dict.fromkeys(Recompute, 0.0))

    def _mlp(self, *, experts: bool) -> float:
        """Bytes that the MLP keeps without its input, or experts with it."""
        model, inside = self.model, self.inside
        if not experts or model.experts is None:
            width = (4 if model.gated else 2) * model.mlp_width // inside.head_parts
            return width * self.number_bytes * self._tokens
        return expert_bytes(
            model.experts,
            model.width,
            samples=self.samples,
            tokens=self._tokens,
            e=self.number_bytes,
            inside=inside,
            imbalance=self.imbalance,
        )

    def block(self, recompute: Recompute, *, experts: bool) -> float:
        if recompute is Recompute.FULL:
            return self.stream
        model, inside, tokens = self.model, self.inside, self._tokens
        dropout = self._dropout
        heads = model.heads // inside.head_parts
        part = self.number_bytes * tokens * model.head_width  # of one head
        queries, keys_values = heads * part, 2 * inside.key_heads(model.key_heads) * part
        mlp = self._mlp(experts=experts)
        stream = 4 * self.stream + 2 * self._mask + 2 * self._norm_numbers
        if experts and model.experts is not None:
            stream -= 0.0 if self._keeps_shared_input else self.stream
        selective = stream + 2 * queries + keys_values + mlp
        if inside.context > 1 and inside.context_kind == "ulysses":
            keys = max(inside.key_heads(model.key_heads), inside.context)
            exchanged = 2 * keys * part - keys_values  # key heads that several processes share
            return selective + (0.0 if recompute is Recompute.SELECTIVE else queries + exchanged + 4 * tokens * heads)
        if recompute is Recompute.SELECTIVE:
            return selective
        scores = tokens * model.sequence_length * heads
        if inside.context > 1 and inside.context_kind == "ring-self-attention":
            return selective + self.number_bytes * scores
        if not self.software.fused_attention:
            return selective + scores * (self.number_bytes * (1 + dropout) + dropout)
        if dropout:  # instead of q, k and v: copies of them for all heads and three tables of weights, in float32
            return selective - queries - keys_values + 3 * 4 * (tokens * model.head_width * heads + scores)
        if inside.context > 1 and 1 < inside.key_heads(model.key_heads) < heads:
            selective += queries  # attention returns groups of heads, whose order the next layer changes in a copy
        return selective + 4 * tokens * heads

    def block_backward(self, parameters: Mapping[str, tuple[int, ...]], *, experts: bool) -> Sequence[BackwardMoment]:
        model, inside, tokens = self.model, self.inside, self._tokens
        e, rows, gated, width = self.number_bytes, 0.0, model.gated, model.mlp_width
        if experts and model.experts is not None:
            gated, width = model.experts.gated, model.experts.expert_width
            rows = model.experts.assignments(round(self.samples), round(tokens))
            if inside.expert > 1:
                rows *= self.imbalance
        inner = e * (rows or tokens) * width / inside.head_parts
        queries = e * tokens * model.attention_width / inside.head_parts
        keys_values = 2 * e * tokens * inside.key_heads(model.key_heads) * model.head_width
        sizes = BlockSizes(
            gradient=self.stream,
            inner=inner,
            mlp=(1 if experts else 2) * self.stream + self._mlp(experts=experts),
            queries=queries,
            keys_values=keys_values,
            widened=4 * queries / e if e < 4 else 0.0,
            scores=self._score_gradients,
            kept=self.block(Recompute.NONE, experts=experts),
        )
        elements = {name: math.prod(shape) for name, shape in parameters.items()}
        up = [f"experts.{part}" if experts else f"mlp_{part}.weight" for part in ("up", "gate", "gate_up")]
        return block_moments(
            sizes,
            gated=gated,
            grouped=experts,
            down=elements["experts.down" if experts else "mlp_down.weight"],
            up=sum(elements.get(name, 0) for name in up),
            attention_out=elements["attention_out.weight"],
            qkv=elements["qkv.weight"],
        )

    @property
    def _score_gradients(self) -> float:
        """Bytes of the gradient of attention's scores, where they exist."""
        scores = self._tokens * self.model.sequence_length * self.model.heads / self.inside.head_parts
        if not self.software.fused_attention or self.inside.context_kind == "ring-self-attention":
            return self.number_bytes * scores
        return 4 * scores if self._dropout else 0.0

    @property
    def _keeps_shared_input(self) -> bool:
        """Whether shared experts keep their input beside the router's."""
        experts = self.model.experts
        return experts is not None and experts.shared > 0 and (self.number_bytes < 4 or self.inside.sequence)

    def norm(self) -> float:
        return self.stream + self._norm_numbers

    @property
    def logits(self) -> float:
        """Number of logits of this process."""
        return self._tokens * -(-self.model.vocabulary_size // self.inside.head_parts)

    def head(self) -> float:
        more = 14 * self._tokens + 8 if self.inside.tensor > 1 else 8 * self._tokens + 4
        return self.stream + 4 * self.logits + more

    def head_backward(self, elements: int) -> Sequence[BackwardMoment]:
        return head_moments(self.logits, self.number_bytes, self.stream, elements, shared=self.inside.tensor > 1)
