"""What is computed: a model as `nn.Sequential`, a batch, a loss. Every system gets the same one.

Shapes: B samples, S positions, D width, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Workload(Protocol):
    """A model, its batch and its loss; the same on every process that asks."""

    @property
    def num_microbatches(self) -> int: ...
    def model(self) -> nn.Sequential: ...
    def batch(self) -> tuple[Tensor, Tensor]: ...
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...
    def cut(self, num_stages: int) -> list[int]: ...
    def without_waits(self) -> Workload: ...


class Embedding(nn.Module):
    """Tokens (B, S) to activations (B, S, D), with learned positions."""

    def __init__(self, vocabulary: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(sequence_length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """A pre-norm transformer block on (B, S, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.query_key_value(self.norm_1(x)).view(B, S, 3, self.heads, D // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    """Activations (B, S, D) to logits (B, S, V)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class GPTWorkload:
    """A GPT of `blocks` blocks on random tokens; `micro_batch` sequences in each of `num_microbatches`."""

    micro_batch: int
    sequence_length: int
    num_microbatches: int
    width: int = 256
    heads: int = 8
    blocks: int = 8
    vocabulary: int = 512

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        blocks = [Block(self.width, self.heads) for _ in range(self.blocks)]
        embedding = Embedding(self.vocabulary, self.sequence_length, self.width)
        return nn.Sequential(embedding, *blocks, Head(self.width, self.vocabulary))

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.micro_batch * self.num_microbatches, self.sequence_length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def cut(self, num_stages: int) -> list[int]:
        """Blocks dealt out evenly; the embedding goes with the first, the head with the last."""
        cut = [self.blocks // num_stages] * num_stages
        cut[0] += 1
        cut[-1] += 1
        return cut

    def without_waits(self) -> GPTWorkload:
        return self


@lru_cache(maxsize=1)
def _lateness_seconds() -> float:
    """How much later than asked for this process wakes from a sleep: the median of 15, at most 0.2 ms."""
    late = []
    for _ in range(15):
        start = time.monotonic()
        time.sleep(0.005)
        late.append(time.monotonic() - start - 0.005)
    return min(sorted(late)[7], 0.0002)


def wait(seconds: float) -> None:
    """Sleep for `seconds` on average: what the operating system adds to a sleep is taken off beforehand."""
    if seconds > 0:
        time.sleep(max(0.0, seconds - _lateness_seconds()))


class _Wait(torch.autograd.Function):
    """The identity, slow in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.backward_seconds = backward_seconds
        wait(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        wait(ctx.backward_seconds)
        return gradient, None, None


class WaitingStage(nn.Module):
    """A stage that multiplies by a parameter of 4 elements, then waits as if it computed."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.waits = (forward_seconds, backward_seconds)

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x * self.scale, *self.waits)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class WaitingWorkload:
    """`num_stages` stages that together wait `num_ranks` times the given seconds; one sample a micro-batch."""

    num_stages: int
    num_microbatches: int
    forward_seconds: float = 0.010
    backward_seconds: float = 0.020

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        stages = [WaitingStage(self.forward_seconds, self.backward_seconds) for _ in range(self.num_stages)]
        return nn.Sequential(*stages)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        return torch.randn(self.num_microbatches, 4, generator=generator), torch.zeros(self.num_microbatches, 4)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def cut(self, num_stages: int) -> list[int]:
        return [1] * num_stages

    def without_waits(self) -> WaitingWorkload:
        return replace(self, forward_seconds=0.0, backward_seconds=0.0)


class AddStage(nn.Module):
    """The cheapest stage that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@dataclass(frozen=True, kw_only=True)
class TinyWorkload:
    """Stages whose computation is next to nothing, so that what a library adds is all there is to see."""

    num_stages: int
    num_microbatches: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(*(AddStage() for _ in range(self.num_stages)))

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        return torch.randn(self.num_microbatches, 4, generator=generator), torch.zeros(self.num_microbatches, 4)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def cut(self, num_stages: int) -> list[int]:
        return [1] * num_stages

    def without_waits(self) -> TinyWorkload:
        return self
