# ruff: noqa: N803  # shapes are part of the names
"""Measure what slices cost on this machine: one rank's share of a GPT, forward and backward, really run.

Shapes: B batch, S slice, C context, W width, H heads, D = W / H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from pipeloom.errors import InputError
from pipeloom.models.gpt import GPT, Block, GPTConfig
from pipeloom.models.init import init_parameters
from pipeloom.plan.slicing.costs import Sample, SliceCosts, fit
from pipeloom.split.profile import LayerTime, profile_layers, threads_of_a_rank

_LONG_SECONDS = 0.1  # of a slice, forward and backward: more is run once; what is new the first time is a small part
_MOST_SECONDS = 1.0  # of a slice: no larger ones are measured

Context = list[tuple[Tensor, Tensor]]  # keys and values of every block, [B, H, C, D]; none at the beginning


class Measured(NamedTuple):
    """Fitted costs, and the root mean square of their relative error over the slices measured with context."""

    costs: SliceCosts
    forward_error: float
    backward_error: float


class Share(nn.Module):
    """Some blocks of a GPT on one slice: ``(x [B, S, W], Context) -> [B, S, W]``, as `profile_layers` calls it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        model = GPT(config)
        init_parameters(model, seed=0)
        self.blocks = model.blocks

    def forward(self, inputs: tuple[Tensor, Context]) -> Tensor:
        x_BSW, context = inputs
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x_BSW = _block_behind(block, x_BSW, context[index] if context else None)
        return x_BSW

    def sample(self, batch: int, length: int, context: int) -> tuple[Tensor, Context]:
        """Inputs of a slice."""
        c = self.config
        x_BSW = torch.randn(batch, length, c.width)
        past = (torch.randn(batch, c.heads, context, c.head_width) for _ in range(2 * c.layers if context else 0))
        return x_BSW, list(zip(past, past, strict=True))


def _block_behind(block: Block, x_BSW: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """A block on a slice behind `past`; positions count from 0, which takes the same time."""
    B, S, W = x_BSW.shape
    qkv_BS3HD = block.qkv(block.attention_norm(x_BSW)).view(B, S, 3, block.heads, W // block.heads)
    if block.rotary is not None:
        qkv_BS3HD = block.rotary(qkv_BS3HD)
    q_BHSD, k_BHSD, v_BHSD = qkv_BS3HD.permute(2, 0, 3, 1, 4).unbind(0)
    p = block.dropout
    if past is None:
        a_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, dropout_p=p, is_causal=True)
    else:
        k_BHSD, v_BHSD = torch.cat([past[0], k_BHSD], 2), torch.cat([past[1], v_BHSD], 2)
        mask = causal_lower_right(S, k_BHSD.shape[2])
        a_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=p)
    a_BSW = block.attention_out(a_BHSD.transpose(1, 2).reshape(B, S, W))
    x_BSW = x_BSW + (F.dropout(a_BSW, p) if p else a_BSW)
    m_BSW = block.mlp_down(F.gelu(block.mlp_up(block.mlp_norm(x_BSW))))
    return x_BSW + (F.dropout(m_BSW, p) if p else m_BSW)


def measure_slices(
    config: GPTConfig,
    *,
    num_ranks: int,
    grid: int = 8,
    piece: int = 1,
    batch: int = 1,
    share: nn.Module | None = None,
    num_rounds: int = 3,
) -> Measured:
    """Costs of slices of sequences of ``config.sequence_length`` tokens, measured here and fitted.

    The rank measured is one with most blocks; embedding and head are left out. It computes with as many threads as the
    launcher gives each of `num_ranks` ranks of this machine; where that is one, its own time counts, so that what else
    the machine does disturbs little. A message costs what copying it in and out takes.

    Args:
        config: sizes of the model.
        num_ranks: ranks that share its blocks.
        grid: the shortest slice that matters.
        piece: sequences that are sliced together; in the costs they count as one.
        batch: the most of those that may go together in a slice.
        share: what to time instead of blocks of pipeloom's GPT: a module with ``sample(batch, length, context)`` that
            makes its inputs.
        num_rounds: times that each slice is run after one that does not count, medians are taken; long ones are run
            once and no more.

    Raises:
        InputError: more ranks than blocks.
    """
    if num_ranks > config.layers:
        raise InputError(f"{num_ranks} ranks share {config.layers} blocks: each has one at least; ask for fewer ranks")
    forward: list[Sample] = []
    backward: list[Sample] = []
    with threads_of_a_rank(num_ranks), torch.random.fork_rng(devices=[]):
        share = share or Share(replace(config, layers=-(-config.layers // num_ranks)))
        for length, context in _points(config.sequence_length, grid):
            time = _time(share, (piece, length, context), num_rounds)
            forward.append(Sample(length, context, time.forward_seconds))
            backward.append(Sample(length, context, time.backward_seconds))
        size = 1
        while size < batch and forward[-1].seconds + backward[-1].seconds < _MOST_SECONDS:
            size = min(2 * size, batch)
            time = _time(share, (size * piece, config.sequence_length, 0), num_rounds)
            forward.append(Sample(size * config.sequence_length, 0, time.forward_seconds))
            backward.append(Sample(size * config.sequence_length, 0, time.backward_seconds))
        latency, per_token = _message(piece * config.width, config.sequence_length)
    (there, forward_error), (back, backward_error) = fit(forward), fit(backward)
    costs = SliceCosts(forward=there, backward=back, latency=latency, seconds_per_token_sent=per_token)
    return Measured(costs, forward_error, backward_error)


def _time(share: nn.Module, sizes: tuple[int, int, int], num_rounds: int) -> LayerTime:
    inputs = share.sample(*sizes)  # type: ignore[operator]
    [time] = profile_layers([("slice", share)], inputs, num_warmups=0, num_rounds=1, timer=_timer())
    if time.forward_seconds + time.backward_seconds < _LONG_SECONDS:
        [time] = profile_layers([("slice", share)], inputs, num_warmups=0, num_rounds=num_rounds, timer=_timer())
    return time


def _timer() -> Callable[[], float]:
    """Autograd runs the backward of CPU tensors in the thread that asks for it."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def _points(sequence: int, grid: int) -> Iterator[tuple[int, int]]:
    """Lengths and contexts to measure: lengths in steps of about 1.5, each alone and behind some contexts."""
    lengths = {min(grid, sequence), sequence}
    length = float(grid)
    while length < sequence:
        lengths.add(max(grid, round(length / grid) * grid))
        length *= 1.5
    for tokens in sorted(each for each in lengths if each <= sequence):
        yield tokens, 0
    for quarter in (1, 2, 3):
        context = quarter * sequence // 4
        room = sequence - context
        for part in (16, 4, 2, 1):
            if context and room // part:
                yield room // part, context


def _message(width: int, sequence: int) -> tuple[float, float]:
    """Seconds of copying a message in and out: of none, and a token more."""

    def copy(tokens: int) -> float:
        source, target = torch.randn(tokens, width), torch.empty(tokens, width)
        times, now = [], _timer()
        for _ in range(7):
            start = now()
            target.copy_(source)
            source.copy_(target)
            times.append(now() - start)
        return sorted(times)[3]

    short, long = copy(1), copy(max(2, sequence))
    return short, max(0.0, long - short) / max(1, sequence - 1)
