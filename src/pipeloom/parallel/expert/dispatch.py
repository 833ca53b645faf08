# ruff: noqa: N803  # shapes are part of the names
"""`ExpertDispatch`: dispatch and combine of a layer of experts between processes, in place of the layer's own.

    every process     rows of its tokens, sorted by expert
    counts            all-to-all of E integers: rows per expert                   (with capacity: none)
    dispatch          all-to-all of rows to the processes of their experts
    experts           compute; with tensor parallelism each process a part of every expert's inner features
    combine           all-to-all back; results times gates are added to their tokens

Two exchanges: "counts" sends the rows there are; "capacity" sends as many rows per expert as its capacity, the rest of
them 0, without counts first (GShard, arXiv:2006.16668, algorithm 1).

Tensor-parallel ranks route the same tokens alike. A router's gradient is whole on each; those of gates and of experts'
inputs are parts, which are summed. The layer's results are parts too, which its `leave` sums.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import copy_to
from pipeloom.parallel.expert.exchange import exchange_counts, exchange_rows, order_by_expert, permute_rows
from pipeloom.parallel.expert.traffic import Exchange

Compute = Callable[[Tensor, Tensor], Tensor]


class ExpertDispatch:
    """``dispatch(x, routing, compute)`` of `pipeloom.models.experts.Experts`: [N, W] -> [N, W].

    Args:
        ep: the processes that share the experts.
        tp: the processes that share each expert.
        sums_input: whether gradients of the input are summed over `tp` here; else the layer's `enter` does.
        exchange: how rows are sent.
    """

    def __init__(self, ep: Axis, tp: Axis, *, sums_input: bool, exchange: Exchange) -> None:
        self._ep, self._tp, self._sums_input, self._exchange = ep, tp, sums_input, exchange

    def __call__(self, x_NW: Tensor, routing: Any, compute: Compute) -> Tensor:
        if self._sums_input:
            x_NW = copy_to(x_NW, self._tp)
        routing = replace(routing, gate=copy_to(routing.gate, self._tp))
        rows_AW = routing.select(x_NW)
        if self._ep.degree == 1:
            results_AW = compute(rows_AW, routing.counts)
        elif self._exchange == "counts":
            results_AW = self._by_counts(rows_AW, routing, compute)
        else:
            results_AW = self._by_capacity(rows_AW, routing, compute)
        combined: Tensor = routing.combine(results_AW, x_NW.shape[0])
        return combined

    def _by_counts(self, rows_AW: Tensor, routing: Any, compute: Compute) -> Tensor:
        received_PE = exchange_counts(routing.counts, self._ep)
        leaving = routing.counts.view(self._ep.degree, -1).sum(1).tolist()
        arrived, arriving = exchange_rows(rows_AW, self._ep, leaving, received_PE.sum(1).tolist())
        if received_PE.shape[1] == 1:  # sorted by expert already
            results = compute(arrived, received_PE.sum(0))
        else:
            order = order_by_expert(received_PE)
            results = compute(permute_rows(arrived, order), received_PE.sum(0))
            results = permute_rows(results, order.argsort())
        return exchange_rows(results, self._ep, arriving, leaving)[0]

    def _by_capacity(self, rows_AW: Tensor, routing: Any, compute: Compute) -> Tensor:
        counts_E, capacity = routing.counts, routing.capacity
        experts, W = counts_E.shape[0], rows_AW.shape[1]
        each, places = experts // self._ep.degree, torch.arange(rows_AW.shape[0], device=rows_AW.device)
        expert_A = torch.arange(experts, device=rows_AW.device).repeat_interleave(
            counts_E, output_size=rows_AW.shape[0]
        )
        slot_A = places - (counts_E.cumsum(0) - counts_E)[expert_A] + expert_A * capacity
        padded = rows_AW.new_zeros(experts * capacity, W).index_copy(0, slot_A, rows_AW)
        leaving = [each * capacity] * self._ep.degree
        arrived, arriving = exchange_rows(padded, self._ep, leaving)
        # Of each process, [experts, capacity there, W]: batches of processes may differ by a sample.
        blocks = [block.view(each, -1, W) for block in torch.split(arrived, arriving)]
        joined = torch.cat(blocks, 1)
        results = compute(joined.reshape(-1, W), counts_E.new_full((each,), joined.shape[1]))
        parts = torch.split(results.view(joined.shape), [block.shape[1] for block in blocks], 1)
        returned, _ = exchange_rows(torch.cat([part.reshape(-1, W) for part in parts]), self._ep, arriving, leaving)
        return returned.index_select(0, slot_A)

    def __deepcopy__(self, memo: object) -> "ExpertDispatch":
        return self  # copies of a layer communicate along the same axes
