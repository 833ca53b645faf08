# ruff: noqa: N803  # shapes are part of the names
"""A small GPT: pre-norm blocks, causal attention, rotary or learned positions.

    embedding ── blocks.0 ── ... ── blocks.L-1 ── norm ── head        in this order: `GPT.pipeline_layers`

The model supports slices of a sequence and context parallelism (see `pipeloom.slicing`).

Shapes: B batch, S tokens of the sequence or slice, W width, H query heads, K key and value heads, N heads of any kind,
D = W / number of query heads, V vocabulary. Layers take the sizes that their inputs and weights have: where a process
holds a part of a layer (`GPT.tensor_plan`), these are the sizes of its part.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.models.experts.layer import Experts
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.models.initialization import STD
from pipeloom.slicing import causal_attention, dropout, position_rows, sequence_length

SEES_THE_FUTURE = (
    "whether an expert takes a token depends on later tokens, so training and evaluation see the future, and "
    "generation does not."
)


class Embedding(nn.Module):
    """Token ids [B, S] of any integer type -> [B, S, W].

    Attributes:
        look_up: ``look_up(tokens, weight)``, the embeddings of tokens without positions.
        tokens_part: the part of the tokens that `look_up` returns: its index, and the number of equal parts.
    """

    sliceable = True
    look_up: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.embedding)
    tokens_part: tuple[int, int] = (0, 1)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.sequence_length, config.width)) if learned else None
        self.sequence_length = config.sequence_length
        self.dropout = config.dropout

    def forward(self, tokens_BS: Tensor) -> Tensor:
        length = sequence_length(tokens_BS.shape[1])
        if length > self.sequence_length:
            raise InputError(
                f"a sequence of {length} tokens is longer than sequence_length={self.sequence_length} of the model. "
                "Shorten it, or increase sequence_length."
            )
        x_BSW = self.look_up(tokens_BS.long(), self.weight)
        if self.positions is not None:
            tokens = tokens_BS.shape[1]
            first = tokens * self.tokens_part[0] // self.tokens_part[1]
            x_BSW = x_BSW + position_rows(self.positions, tokens)[first : first + x_BSW.shape[1]]
        return dropout(x_BSW, self.dropout, self) if self.training else x_BSW


class Rotary(nn.Module):
    """Rotates the pairs (i, i + D/2) of queries and keys by position * 10000^(-2i/D); leaves values unchanged.

    The tables are [S, 3, 1, D], which rotates the fused queries, keys and values in one operation. This saves kernel
    launches at small sizes, and costs little of a block's time at large ones. With fewer key heads than query heads, it
    takes queries and keys alone, as heads [B, S, N, D].
    """

    sliceable = True
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.shape = (config.sequence_length, config.head_width)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(self.shape[0], 3, 1, self.shape[1]), persistent=False)
        if not self.cos.is_meta:
            self.reset_buffers()

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        length, width = self.shape
        half = torch.arange(width // 2, dtype=torch.float64, device=device)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), 10000.0 ** (-2.0 * half / width))
        cos, sin = angle.cos(), angle.sin()
        rotated_cos, rotated_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        cos_S31D = torch.stack([rotated_cos, rotated_cos, torch.ones_like(rotated_cos)], 1).unsqueeze(2)
        sin_S31D = torch.stack([rotated_sin, rotated_sin, torch.zeros_like(rotated_sin)], 1).unsqueeze(2)
        return cos_S31D.to(torch.get_default_dtype()), sin_S31D.to(torch.get_default_dtype())

    def reset_buffers(self) -> None:
        """Recompute the tables, on their device and in their dtype."""
        for buffer, table in zip((self.cos, self.sin), self._tables(self.cos.device), strict=True):
            buffer.copy_(table)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate fused queries, keys and values [B, S, 3, H, D], or queries and keys [B, S, N, D]."""
        cos, sin = (position_rows(table, x.shape[1]) for table in (self.cos, self.sin))
        if x.dim() == 4:
            cos, sin = cos[:, 0], sin[:, 0]
        return torch.addcmul(x * cos, x.roll(self.shape[1] // 2, -1), sin)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): [B, S, W] -> [B, S, W].

    A block of a mixture has `experts` in place of `mlp_up` and `mlp_down`, which are then None.

    The rows of `qkv` are those of all queries, then of all keys, then of all values, each by heads.
    """

    sliceable = True

    def __init__(self, config: GPTConfig, index: int = 0) -> None:
        super().__init__()
        width = config.width
        # GPT-2: layers that add to the residual stream are scaled by 1 / sqrt(number of additions).
        added_std = STD / (2 * config.layers) ** 0.5
        self.init_std = dict.fromkeys(("attention_out", "mlp_down"), added_std)
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, sum(size for size, _ in config.qkv_sections), bias=False)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_up: nn.Linear | None = None
        self.mlp_down: nn.Linear | None = None
        self.experts: Experts | None = None
        if config.has_experts(index):
            self.experts = Experts(
                width,
                expert_width=config.width_of_expert,
                shared_experts=config.shared_experts,
                down_std=added_std,
                **config.expert_settings,
            )
        else:
            self.mlp_up = nn.Linear(width, config.mlp_ratio * width, bias=False)
            self.mlp_down = nn.Linear(config.mlp_ratio * width, width, bias=False)
        self.head_width = config.head_width
        self.queries_per_key = config.heads // config.key_heads
        self.dropout = config.dropout

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads and key heads of this process."""
        heads = self.qkv.weight.shape[0] // self.head_width
        keys = max(1, heads // (self.queries_per_key + 2))
        return heads - 2 * keys, keys

    @property
    def attention_dropout(self) -> float:
        """Dropout probability of attention weights in training."""
        return self.dropout

    def forward(self, x_BSW: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        a_BSW = self.attention_out(self.attention(self.qkv(self.attention_norm(x_BSW)), p))
        x_BSW = x_BSW + (dropout(a_BSW, p, (self, "attention")) if p else a_BSW)
        m_BSW = self.mlp(self.mlp_norm(x_BSW))
        return x_BSW + (dropout(m_BSW, p, (self, "mlp")) if p else m_BSW)

    def mlp(self, x_BSW: Tensor) -> Tensor:
        """The MLP, or the experts, of normalized tokens [B, S, W] -> [B, S, W]."""
        m_BSW: Tensor
        if self.mlp_up is not None and self.mlp_down is not None:
            m_BSW = self.mlp_down(F.gelu(self.mlp_up(x_BSW)))
        else:
            assert self.experts is not None
            m_BSW = self.experts(x_BSW)
        return m_BSW

    def attention(self, qkv: Tensor, p: float) -> Tensor:
        """Causal attention of fused queries, keys and values [B, S, (H + 2 K) D] -> [B, S, H D]; dropout `p`."""
        B, S, _ = qkv.shape
        if self.queries_per_key == 1:
            qkv_BS3HD = qkv.view(B, S, 3, -1, self.head_width)
            if self.rotary is not None:
                qkv_BS3HD = self.rotary(qkv_BS3HD)
            q_BHSD, k_BKSD, v_BKSD = qkv_BS3HD.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            qkv_BSND = qkv.view(B, S, -1, self.head_width)
            # A process that shares a key head with others has this one, and a part of its queries.
            keys = max(1, qkv_BSND.shape[2] // (self.queries_per_key + 2))
            queries = qkv_BSND.shape[2] - 2 * keys
            qk_BSND, v_BSKD = torch.split(qkv_BSND, [queries + keys, keys], 2)
            if self.rotary is not None:
                qk_BSND, v_BSKD = self.rotary(qk_BSND), v_BSKD.contiguous()  # else v would keep all of `qkv`
            q_BSHD, k_BSKD = torch.split(qk_BSND, [queries, keys], 2)
            q_BHSD, k_BKSD, v_BKSD = (part.transpose(1, 2) for part in (q_BSHD, k_BSKD, v_BSKD))
        a_BHSD = causal_attention(q_BHSD, k_BKSD, v_BKSD, self, dropout_p=p)
        return a_BHSD.transpose(1, 2).reshape(B, S, -1)


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, V].

    Parameters are uninitialized: call `pipeloom.models.init_parameters`, or build the model on the meta device and call
    `pipeloom.models.materialize` for each stage on its rank.
    """

    sliceable = True
    pipeline_layers = ("embedding", "blocks.*", "norm", "head")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.experts and config.router == "expert-choice":
            warnings.warn(f"router 'expert-choice' in a causal model: {SEES_THE_FUTURE}", stacklevel=2)
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def tensor_plan(self) -> dict[str, Any]:
        """How processes share the layers, for `pipeloom.parallelize`: name pattern -> kind, or (kind, sections).

        Sections are (rows, heads): the rows of `qkv` are cut between heads, each section by itself.
        """
        plan: dict[str, Any] = {
            "embedding": "vocabulary",
            "blocks.*.qkv": ("column", self.config.qkv_sections),
            "blocks.*.attention_out": ("row", ((self.config.width, self.config.heads),)),
        }
        mixtures = {self.config.has_experts(index) for index in range(self.config.layers)}
        if False in mixtures:
            plan |= {"blocks.*.mlp_up": "column", "blocks.*.mlp_down": "row"}
        if True in mixtures:
            plan["blocks.*.experts"] = "experts"
        return {**plan, "head": "vocabulary"}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSW: Tensor = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSW = block(x_BSW)
        logits_BSV: Tensor = self.head(self.norm(x_BSW))
        return logits_BSV


def loss_fn(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in nats; `targets_BS` has any integer dtype."""
    return F.cross_entropy(logits_BSV.flatten(0, -2), targets_BS.flatten().long())
