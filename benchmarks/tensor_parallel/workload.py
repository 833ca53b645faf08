"""A GPT that pipeloom and torch's DTensor can both cut, as `nn.Sequential`.

Queries, keys and values are fused by heads, as in Megatron: any block of whole heads is a contiguous block of rows, so
that a plain column cut is right. Vocabularies are cut on both sides, and the loss is computed from logits in parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block on (B, S, D); with a part of the heads where its layers are cut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x))
        B, S, _ = qkv.shape
        q, k, v = qkv.view(B, S, -1, 3, self.head_width).permute(3, 0, 2, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(B, S, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT without positions, and its batch; a `benchmarks.common.workloads.Workload`."""

    width: int
    heads: int
    blocks: int
    micro_batch: int = 4
    sequence_length: int = 256
    num_microbatches: int = 4
    vocabulary: int = 512

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        blocks = [Block(self.width, self.heads) for _ in range(self.blocks)]
        head = nn.Linear(self.width, self.vocabulary, bias=False)
        return nn.Sequential(nn.Embedding(self.vocabulary, self.width), *blocks, nn.LayerNorm(self.width), head)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.micro_batch * self.num_microbatches, self.sequence_length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def cut(self, num_stages: int) -> list[int]:
        """Blocks dealt out evenly; the embedding goes with the first, norm and head with the last."""
        cut = [self.blocks // num_stages] * num_stages
        cut[0] += 1
        cut[-1] += 2
        return cut

    def without_waits(self) -> Sizes:
        return self

    def block_names(self) -> list[str]:
        return [str(1 + number) for number in range(self.blocks)]

    @property
    def norm(self) -> str:
        return str(1 + self.blocks)

    @property
    def head(self) -> str:
        return str(2 + self.blocks)

    def plan(self) -> dict[str, str]:
        """The plan of `pipeloom.parallelize`."""
        kinds = {"qkv": "column", "project": "row", "up": "column", "down": "row"}
        found = {f"{block}.{layer}": kind for block in self.block_names() for layer, kind in kinds.items()}
        return {"0": "vocabulary", **found, self.head: "vocabulary"}
