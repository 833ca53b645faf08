# ruff: noqa: N803  # shapes are part of the names
"""Rows of tokens that expert-parallel processes exchange, differentiable (GShard, arXiv:2006.16668, section 3.3).

    process 0                     process 1
    rows  a0 a1 | b0 | | d0       rows  a2 | b1 b2 | c1 |        sorted by expert; | ends the rows of an expert
    experts a, b: a0 a1 a2, b0 b1 b2                             experts c, d: c1, d0

An exchange sends rows of the first experts to process 0, and so on. Its backward sends the gradients back. Both are
collectives inside F and B (or I), which every process of axis ep calls as often, with rows or without.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function


def exchange_rows(
    rows: Tensor, axis: Axis, leaving: Sequence[int], arriving: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Send neighbouring rows to each process, and join those that arrive.

    Args:
        rows: [sum(leaving), W].
        axis: of the processes.
        leaving: number of rows for each process.
        arriving: number of rows from each process; None: as many as each sends.

    Returns:
        [sum(arriving), W], in the order of processes, and `arriving`.
    """
    found = [] if arriving is None else list(arriving)
    return apply_function(_ExchangeRows, rows, axis, list(leaving), found), found


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """``rows[order]`` of a permutation; its backward reads rows too, where that of indexing would add them up."""
    return apply_function(_PermuteRows, rows, order)


def exchange_counts(counts_E: Tensor, axis: Axis) -> Tensor:
    """The rows that each process has for the experts of this one: [E] -> [processes, E / processes], int64."""
    pieces = list(counts_E.view(axis.degree, -1))
    return torch.stack(axis.all_to_all(pieces, [piece.shape for piece in pieces]))


def order_by_expert(received_PE: Tensor) -> Tensor:
    """Which arrived row comes where, once rows sorted by process and expert are sorted by expert and process.

    Args:
        received_PE: [P, E], rows of each process and expert.
    """
    processes, experts = received_PE.shape
    expert = torch.arange(experts, device=received_PE.device).repeat(processes)
    return expert.repeat_interleave(received_PE.reshape(-1)).argsort(stable=True)


def _exchanged(rows: Tensor, axis: Axis, leaving: Sequence[int], arriving: Sequence[int]) -> list[Tensor]:
    width = rows.shape[1:]
    shapes = [(size, *width) for size in arriving] or None
    return axis.all_to_all(torch.split(rows, list(leaving)), shapes)


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, leaving: list[int], arriving: list[int]) -> Tensor:
        found = _exchanged(rows, axis, leaving, arriving)
        arriving[:] = [len(piece) for piece in found]
        ctx.axis, ctx.leaving, ctx.arriving = axis, leaving, arriving
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.cat(_exchanged(gradient, ctx.axis, ctx.arriving, ctx.leaving)), None, None, None


class _PermuteRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(gradient).index_copy_(0, order, gradient), None
