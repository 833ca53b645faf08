# ruff: noqa: N803  # shapes are part of the names
"""A small GPT: pre-norm blocks, causal attention, rotary or learned positions.

    embedding ── blocks.0 ── ... ── blocks.L-1 ── norm ── head        run one after another: `GPT.pipeline_layers`

It also runs on one slice of a sequence after another (see `pipeloom.slicing`).

Shapes: B batch, S sequence (or slice of one), W width, H heads, D = W / H, V vocabulary, T = B * S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.slicing import causal_attention, current_slice, dropout


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        vocabulary_size: number of token ids (256: bytes).
        layers: number of blocks.
        width: width of the residual stream; divisible by `heads`.
        heads: attention heads.
        sequence_length: the longest sequence.
        tie_embeddings: the head uses the embedding's weight.
        positions: "rotary" turns queries and keys (arXiv:2104.09864); "learned" adds a table to the embedding.
        dropout: probability, on the embedding, the attention weights and both branches of a block.
        mlp_ratio: width of the MLP over `width`.
    """

    vocabulary_size: int = 256
    layers: int = 6
    width: int = 192
    heads: int = 6
    sequence_length: int = 128
    tie_embeddings: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    dropout: float = 0.0
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "layers", "width", "heads", "sequence_length", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise InputError(f"model {name}={getattr(self, name)}: a size is at least 1; raise it")
        if self.width % self.heads:
            near = [h for h in range(1, self.width + 1) if self.width % h == 0]
            fix = min(near, key=lambda h: (abs(h - self.heads), h))
            raise InputError(
                f"model width={self.width} and heads={self.heads}: the heads share the width evenly; use heads={fix}"
            )
        if self.positions not in ("rotary", "learned"):
            raise InputError(f"model positions={self.positions!r}: they are 'rotary' or 'learned'; choose one")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise InputError(
                f"model width={self.width} and heads={self.heads} make heads of width {self.width // self.heads}: "
                "rotary positions turn pairs, so it must be even; change heads or use positions='learned'"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"model dropout={self.dropout}: a probability below 1; use one from 0 up to 1")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        block = (4 + 2 * self.mlp_ratio) * self.width**2 + 2 * self.width
        tables = self.vocabulary_size * (1 if self.tie_embeddings else 2)
        tables += self.sequence_length if self.positions == "learned" else 0
        return self.layers * block + (tables + 1) * self.width


class Embedding(nn.Module):
    """Token ids [B, S] of any integer type -> [B, S, W]."""

    sliceable = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.sequence_length, config.width)) if learned else None
        self.sequence_length = config.sequence_length
        self.dropout = config.dropout

    def forward(self, tokens_BS: Tensor) -> Tensor:
        piece = current_slice()
        start, length = (piece.start, piece.length) if piece else (0, tokens_BS.shape[1])
        if length > self.sequence_length:
            raise InputError(
                f"a sequence of {length} tokens: this model has positions for {self.sequence_length}; cut it, or raise "
                "sequence_length"
            )
        x_BSW = F.embedding(tokens_BS.long(), self.weight)
        if self.positions is not None:
            x_BSW = x_BSW + self.positions[start : start + tokens_BS.shape[1]]
        return dropout(x_BSW, self.dropout, self) if self.training else x_BSW


class Rotary(nn.Module):
    """Turn the pairs (i, i + D/2) of queries and keys by position * 10000^(-2i/D); values pass through unturned.

    The tables are [S, 3, 1, D] so that the fused queries, keys and values are turned in one go: at small sizes the
    number of operations is what counts, at large ones this is a small part of a block.
    """

    sliceable = True
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.shape = (config.sequence_length, config.head_width)
        for name, table in zip(("cos", "sin"), self._tables(None), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device | None) -> tuple[Tensor, Tensor]:
        length, width = self.shape
        half = torch.arange(width // 2, dtype=torch.float64, device=device)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), 10000.0 ** (-2.0 * half / width))
        cos, sin = angle.cos(), angle.sin()
        still = torch.ones_like(cos), torch.zeros_like(sin)
        turn_cos, turn_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        keep_cos, keep_sin = torch.cat([still[0]] * 2, -1), torch.cat([still[1]] * 2, -1)
        cos_S31D = torch.stack([turn_cos, turn_cos, keep_cos], 1).unsqueeze(2)
        sin_S31D = torch.stack([turn_sin, turn_sin, keep_sin], 1).unsqueeze(2)
        return cos_S31D.to(torch.get_default_dtype()), sin_S31D.to(torch.get_default_dtype())

    def reset_buffers(self) -> None:
        """Fill the tables anew, on the device and in the type that they have."""
        for buffer, table in zip((self.cos, self.sin), self._tables(self.cos.device), strict=True):
            buffer.copy_(table)

    def forward(self, qkv_BS3HD: Tensor) -> Tensor:
        cos, sin = self.cos, self.sin
        piece = current_slice()
        start, length = piece.start if piece else 0, qkv_BS3HD.shape[1]
        if length != self.shape[0]:
            cos, sin = cos[start : start + length], sin[start : start + length]
        return torch.addcmul(qkv_BS3HD * cos, qkv_BS3HD.roll(self.shape[1] // 2, -1), sin)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): [B, S, W] -> [B, S, W]."""

    sliceable = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_up = nn.Linear(width, config.mlp_ratio * width, bias=False)
        self.mlp_down = nn.Linear(config.mlp_ratio * width, width, bias=False)
        self.heads = config.heads
        self.dropout = config.dropout
        # GPT-2: what adds to the residual stream starts smaller, by the root of how many additions there are.
        self.init_std = dict.fromkeys(("attention_out", "mlp_down"), 0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x_BSW: Tensor) -> Tensor:
        B, S, W = x_BSW.shape
        x_TW = x_BSW.reshape(B * S, W)
        qkv_BS3HD = self.qkv(self.attention_norm(x_TW)).view(B, S, 3, self.heads, W // self.heads)
        if self.rotary is not None:
            qkv_BS3HD = self.rotary(qkv_BS3HD)
        q_BHSD, k_BHSD, v_BHSD = qkv_BS3HD.permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        a_BHSD = causal_attention(q_BHSD, k_BHSD, v_BHSD, self, dropout_p=p)
        a_TW = self.attention_out(a_BHSD.transpose(1, 2).reshape(B * S, W))
        x_TW = x_TW + (dropout(a_TW.view(B, S, W), p, (self, "attention")).view(B * S, W) if p else a_TW)
        m_TW = self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x_TW))))
        x_TW = x_TW + (dropout(m_TW.view(B, S, W), p, (self, "mlp")).view(B * S, W) if p else m_TW)
        return x_TW.view(B, S, W)


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, V].

    Parameters are left without values: call `pipeloom.models.init_parameters`, or build it on the meta device and
    `pipeloom.models.materialize` each stage where it lives.
    """

    sliceable = True
    pipeline_layers = ("embedding", "blocks.*", "norm", "head")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSW: Tensor = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSW = block(x_BSW)
        logits_BSV: Tensor = self.head(self.norm(x_BSW))
        return logits_BSV


def loss_fn(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross entropy over all tokens, in nats; `targets_BS` is of any integer type."""
    return F.cross_entropy(logits_BSV.flatten(0, -2), targets_BS.flatten().long())
