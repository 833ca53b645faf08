"""What is computed: a model as `nn.Sequential`, a batch, a loss. Every system gets the same one.

Shapes: B samples, S positions, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.processes import running_first
from pipeloom.slicing import current_slice


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


class _Waits:
    """Sleeps that take what they were asked for on average: what one is late, the next ones make up for.

    An operating system ends a sleep 0.05 to 0.15 ms late. That is no time of the pipeline, and it would add up.
    """

    _MOST_SECONDS = 0.001  # to be made up for: what is late by more was held up by another process

    def __init__(self) -> None:
        self._late_seconds = 0.0
        self._slept_seconds = 0.0

    def __call__(self, seconds: float) -> None:
        if seconds > 0:
            start = time.monotonic()
            due = max(0.0, seconds - self._late_seconds)
            time.sleep(due)
            slept = time.monotonic() - start
            self._slept_seconds += slept
            self._late_seconds += due - seconds + min(slept - due, self._MOST_SECONDS)

    def awake_seconds(self) -> float:
        """A clock that stands still within sleeps."""
        return time.monotonic() - self._slept_seconds

    def make_up(self, seconds: float) -> None:
        """Let the next sleeps be shorter by what was computed."""
        self._late_seconds += min(seconds, self._MOST_SECONDS)


wait = _Waits()


Seconds = tuple[float, float, float]  # of F, I and W


class _Wait(torch.autograd.Function):
    """The identity, slow in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, stage: WaitingStage) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.stage, ctx.seconds = stage, stage.seconds_now(x)
        wait(ctx.seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        _, backward_input, ctx.stage.weight_seconds = ctx.seconds
        wait(backward_input)
        return gradient, None


class WaitingStage(nn.Module):
    """A linear layer of 4 x 4 weights that waits as if it computed: in F, in I, and in W.

    I waits in the backward of a function. W waits in a hook on the weight, which autograd calls with the weight's
    gradient, whenever that is computed: at once in a whole backward, in W where the backward is split.

    Args:
        seconds: to wait in F, I and W; or what they are for a slice of so many tokens behind so many others (W then
            follows its I at once).
    """

    sliceable = True

    def __init__(self, seconds: Seconds | Callable[[int, int], Seconds]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4) / 2)
        self.weight.register_hook(self._wait_for_weight)
        self.seconds = seconds
        self.weight_seconds = 0.0
        self.weight_started = 0.0

    def seconds_now(self, x: Tensor) -> Seconds:
        """Of the slice that runs, or of whole sequences."""
        if not callable(self.seconds):
            return self.seconds
        piece = current_slice()
        return self.seconds(x.shape[1], 0 if piece is None else piece.start)

    def _wait_for_weight(self, gradient: Tensor) -> None:
        self.weight_started = time.monotonic()
        wait(self.weight_seconds)

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(F.linear(x, self.weight), self)  # type: ignore[no-any-return]


_MOST_OWN_SECONDS = 0.0008  # more was another process's doing


@cache
def _own_seconds(*, with_loss: bool) -> Seconds:
    """What F, I and W of a waiting stage take in this process beside the waits; medians. The last stage has the loss.

    Some 0.2 to 0.5 ms each: in a wait the caches go cold.
    """
    seconds = 0.005
    stage, target = WaitingStage((seconds,) * 3), torch.zeros(1, 4)
    found = []
    with running_first():
        for _ in range(16):
            x = torch.randn(1, 4).requires_grad_()
            start = time.monotonic()
            y = stage(x)
            if with_loss:
                y = F.mse_loss(y, target)
            forward_end = time.monotonic()
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                (y,), (torch.ones_like(y),), False, False, (), True, True
            )
            times = (start, forward_end, stage.weight_started, time.monotonic())
            found.append([end - begin - seconds for begin, end in pairwise(times)])
    f, i, w = (min(max(0.0, median(own)), _MOST_OWN_SECONDS) for own in zip(*found[1:], strict=True))
    return f, i, w


def _without(seconds: Seconds, own: Seconds) -> Seconds:
    f, i, w = (max(0.0, total - part) for total, part in zip(seconds, own, strict=True))
    return f, i, w


@dataclass(frozen=True, kw_only=True)
class WaitingWorkload:
    """`num_stages` stages of which each takes `seconds` for F, I and W, nearly all of it waiting.

    What else a stage does, measured in each process, is taken off the waits. One sample a micro-batch.
    """

    num_stages: int
    num_microbatches: int
    seconds: tuple[float, float, float] = (0.010, 0.010, 0.010)

    def model(self) -> nn.Sequential:
        def waits(stage: int) -> Seconds:
            if not any(self.seconds):
                return self.seconds
            return _without(self.seconds, _own_seconds(with_loss=stage == self.num_stages - 1))

        kept = [waits(stage) for stage in range(self.num_stages)]
        torch.manual_seed(7)
        return nn.Sequential(*map(WaitingStage, kept))

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        return torch.randn(self.num_microbatches, 4, generator=generator), torch.zeros(self.num_microbatches, 4)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def cut(self, num_stages: int) -> list[int]:
        return [1] * num_stages

    def without_waits(self) -> WaitingWorkload:
        return replace(self, seconds=(0.0, 0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class SequenceCosts:
    """Seconds of one rank on a slice: some of its own, some a token, and some for each pair of tokens that attend.

    A `pipeloom.plan.slicing.SliceTime`; the backward takes twice the forward.
    """

    slice_seconds: float
    token_seconds: float
    pair_seconds: float

    def __call__(self, batch: int, length: int, context: int) -> tuple[float, float]:
        pairs = length * (context + length / 2)
        forward = self.slice_seconds + batch * (length * self.token_seconds + pairs * self.pair_seconds)
        return forward, 2 * forward


@dataclass(frozen=True, kw_only=True)
class WaitingSequences:
    """`WaitingWorkload` on sequences: what a stage takes depends on the slice. One sequence a micro-batch."""

    num_stages: int
    num_microbatches: int
    sequence: int
    costs: SequenceCosts | None

    def model(self) -> nn.Sequential:
        costs, last = self.costs, self.num_stages - 1

        def waits(stage: int) -> Callable[[int, int], Seconds]:
            own = (0.0, 0.0, 0.0) if costs is None else _own_seconds(with_loss=stage == last)

            def seconds(length: int, context: int) -> Seconds:
                forward, backward = (0.0, 0.0) if costs is None else costs(1, length, context)
                return _without((forward, backward / 2, backward / 2), own)

            return seconds

        kept = [waits(stage) for stage in range(self.num_stages)]
        torch.manual_seed(7)
        return nn.Sequential(*map(WaitingStage, kept))

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.num_microbatches, self.sequence, 4)
        return torch.randn(shape, generator=generator), torch.zeros(shape)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def cut(self, num_stages: int) -> list[int]:
        return [1] * num_stages

    def without_waits(self) -> WaitingSequences:
        return replace(self, costs=None)


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
