# ruff: noqa: N803  # shapes are part of the names
"""`Routing`: which expert computes which token, in one form for all routers.

Shapes: N tokens, W width, E experts, K choices per token, A assignments (a token given to an expert), G groups of N / G
tokens, each of which has its own capacity per expert.

    token    [ 0 2 3 | 1 2 | - | 0 1 3 ]       sorted by expert; within an expert by group, then choice, then token
    counts     3       2     0   3
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Compute = Callable[[Tensor, Tensor], Tensor]
"""``compute(rows_AW, counts_E)``: the results of the experts, [A, W]; rows sorted by expert, counts of each."""


@dataclass(slots=True)
class Routing:
    """The assignments of tokens to experts.

    Attributes:
        token: [A] int64, the token of each assignment; sorted by expert.
        gate: [A], the factor of the expert's result; of the dtype of the router, with a graph.
        counts: [E] int64, assignments per expert, after drops.
        losses: auxiliary losses by name: the value, a mean over the tokens, and its weight.
        observed: counts for monitoring, summed over tokens: "chosen" [E] (assignments before drops), "dropped" (those
            over capacity), "tokens", "entropy" (of a token's shares of all experts, in nats), and of expert-choice
            "untaken", tokens without an expert.
        order: [A] int64, where each assignment stands among the choices [K, N], if every token has K; else None.
        capacity: most assignments per expert, of all groups together; None: no limit.
    """

    token: Tensor
    gate: Tensor
    counts: Tensor
    losses: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    order: Tensor | None = None
    capacity: int | None = None

    def select(self, x_NW: Tensor) -> Tensor:
        """The tokens of all assignments: [N, W] -> [A, W]."""
        return x_NW.index_select(0, self.token)

    def combine(self, rows_AW: Tensor, tokens: int) -> Tensor:
        """Add the experts' results, times their gates, to their tokens: [A, W] -> [N, W]. Others get 0."""
        gate_A = self.gate.to(rows_AW.dtype)
        combined: Tensor
        if rows_AW.device.type == "cpu" and rows_AW.shape[0]:
            places = self._by_token(tokens)
            combined = _AddWeightedRows.apply(rows_AW, gate_A, self.token, *places)  # type: ignore[no-untyped-call]
        else:
            weighted_AW = rows_AW * gate_A.unsqueeze(1)
            combined = _AddRows.apply(weighted_AW, self.token, tokens)  # type: ignore[no-untyped-call]
        return combined

    def _by_token(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The assignments sorted by token, [A], and where those of each token start, [N]."""
        if self.order is None:
            sorted_token_A, place_A = torch.sort(self.token, stable=True)
            return place_A, torch.searchsorted(sorted_token_A, torch.arange(tokens))
        assignments = self.order.shape[0]
        place_A = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(assignments))
        choices = assignments // tokens
        return place_A.view(choices, tokens).t().reshape(-1), torch.arange(0, assignments, choices)


class _AddRows(torch.autograd.Function):
    """Adds rows [A, W] to tokens [N, W]. The backward of ``index_add`` would keep the rows for their shape."""

    @staticmethod
    def forward(ctx: Any, rows_AW: Tensor, token_A: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token_A)
        return rows_AW.new_zeros(tokens, rows_AW.shape[1]).index_add_(0, token_A, rows_AW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NW: Tensor) -> tuple[Tensor, None, None]:
        (token_A,) = ctx.saved_tensors
        return gradient_NW.index_select(0, token_A), None, None


class _AddWeightedRows(torch.autograd.Function):
    """Adds rows [A, W] times gates [A] to tokens, [N, W]: reads each row once, forward and backward.

    The backward of ``embedding_bag`` would sort the assignments again, and read the rows three times.
    """

    @staticmethod
    def forward(ctx: Any, rows_AW: Tensor, gate_A: Tensor, token_A: Tensor, place_A: Tensor, start_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_AW if ctx.needs_input_grad[1] else None, gate_A, token_A)
        weights_A = gate_A.index_select(0, place_A)
        return F.embedding_bag(place_A, rows_AW, start_N, mode="sum", per_sample_weights=weights_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NW: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows_AW, gate_A, token_A = ctx.saved_tensors
        of_result_AW, of_rows, of_gate = gradient_NW.index_select(0, token_A), None, None
        if ctx.needs_input_grad[1]:
            of_gate = torch.linalg.vecdot(of_result_AW, rows_AW)
        if ctx.needs_input_grad[0]:
            of_rows = of_result_AW.mul_(gate_A.unsqueeze(1))
        return of_rows, of_gate, None, None, None


def assign(
    expert_NK: Tensor,
    gate_NK: Tensor,
    experts: int,
    *,
    groups: int = 1,
    capacity: int | None = None,
    sent_NK: Tensor | None = None,
) -> Routing:
    """Sort the choices of tokens by expert, and drop those over capacity.

    Within a group, all first choices come before all second choices (GShard, arXiv:2006.16668, algorithm 1); equal
    choices are in order of tokens.

    Args:
        expert_NK: [N, K] int64, choices of each token, first choice first.
        gate_NK: [N, K], their gates.
        experts: number of experts.
        groups: number of equal groups of consecutive tokens.
        capacity: most assignments per expert and group; None: no limit.
        sent_NK: [N, K] bool, the choices that are made; None: all. Others take no place.
    """
    N = expert_NK.shape[0]
    key = expert_NK.t()  # [K, N]: choices before tokens
    if groups > 1 and capacity is not None:
        group_N = torch.arange(groups, device=key.device).repeat_interleave(N // groups)
        key = key * groups + group_N
    else:
        groups = 1
    if sent_NK is not None:
        key = key.masked_fill(~sent_NK.t(), experts * groups)
    key = key.reshape(-1)
    sorted_key, order = torch.sort(key, stable=True)
    held = torch.bincount(key, minlength=experts * groups + 1)[: experts * groups]
    if capacity is None and sent_NK is None:
        counts = held
    else:
        kept = sorted_key < experts * groups
        if capacity is not None:
            start = torch.cat([held.cumsum(0) - held, held.sum().view(1)])
            place = torch.arange(key.numel(), device=key.device) - start[sorted_key]
            kept &= place < capacity
            held = held.clamp(max=capacity)
        order = order[kept]
        counts = held.view(experts, groups).sum(1)
    gate_A = gate_NK.t().reshape(-1).index_select(0, order)
    return Routing(order % N, gate_A, counts, order=order if order.shape[0] == expert_NK.numel() else None)


def dispatch_here(x_NW: Tensor, routing: Routing, compute: Compute) -> Tensor:
    """Run the experts of all tokens in this process: [N, W] -> [N, W]."""
    return routing.combine(compute(routing.select(x_NW), routing.counts), x_NW.shape[0])
