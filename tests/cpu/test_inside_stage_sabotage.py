"""The comparison of the matrix notices every sum inside a stage that is skipped, and a bias that is added twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeloom.engine.stores.blocks import BlockSum
from pipeloom.parallel.axis_forms import ChannelAxis
from pipeloom.parallel.data.links import ThreadLinks
from pipeloom.parallel.tensor.grids.layers import GridLinear
from pipeloom.parallel.tensor.one_d.linear import RowLinear
from tests.cpu.inside_stage import LAYOUTS, Case, in_threads

ROW, GRID = RowLinear.forward, GridLinear.forward


def _on_grid_twice(layer: GridLinear, x):
    y = GRID(layer, x)
    return y if layer.bias is None else y + layer.bias


# Class, method, and what replaces it: no value of another rank arrives, and shapes are right.
SABOTAGE: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "all-reduce": (ChannelAxis, "_all_reduce", lambda axis, x, combine: x.clone()),
    "reduce": (ChannelAxis, "_reduce", lambda axis, x, target: x if axis.index == target else None),
    "reduce-scatter": (ChannelAxis, "_reduce_scatter", lambda axis, pieces: pieces[axis.index].clone()),
    "all-gather": (ChannelAxis, "_all_gather", lambda axis, x: [x] * axis.degree),
    "all-to-all": (
        ChannelAxis,
        "_all_to_all",
        lambda axis, pieces, arriving: [pieces[axis.index].clone() for _ in pieces],
    ),
    "shift": (ChannelAxis, "_shift", lambda axis, tensors, by: lambda: [tensor.clone() for tensor in tensors]),
    "gradients over replicas": (ThreadLinks, "_sum", lambda links, leaving, values: []),
    "gradients inside the stage": (BlockSum, "finish", lambda blocks: None),
    "bias": (RowLinear, "forward", lambda layer, x: ROW(layer, x) + layer.bias),
    "bias on a grid": (GridLinear, "forward", _on_grid_twice),
}
ALWAYS = ["all-reduce", "gradients inside the stage"]
NOTICED = {
    "1d": [*ALWAYS, "bias", "gradients over replicas"],
    "1d with sequence": [*ALWAYS, "reduce-scatter", "all-gather", "bias"],
    "2d": [*ALWAYS, "reduce", "bias on a grid"],
    "2.5d": [*ALWAYS, "reduce", "bias on a grid"],
    "3d": [*ALWAYS, "reduce-scatter", "all-gather", "all-to-all", "bias on a grid"],
    "ring": ["shift", "gradients over replicas"],
    "ring-self-attention": ["shift", "reduce-scatter", "gradients over replicas"],
    "ulysses": ["all-to-all", "gradients over replicas"],
}


ELSEWHERE = {  # in whole grids: the same code of a layout with fewer ranks is noticed in every run
    "1d with sequence": [*ALWAYS, "bias"],
    "2.5d": ["gradients inside the stage", "reduce", "bias on a grid"],
    "3d": [*ALWAYS, "bias on a grid"],
}


def _cases() -> list[Any]:
    return [
        pytest.param(layout, what, marks=pytest.mark.whole_grid if what in ELSEWHERE.get(layout, ()) else ())
        for layout, found in NOTICED.items()
        for what in found
    ]


@pytest.mark.parametrize(("layout", "what"), _cases())
def test_a_skipped_sum_or_a_doubled_bias_is_noticed(monkeypatch: pytest.MonkeyPatch, layout: str, what: str) -> None:
    owner, method, replacement = SABOTAGE[what]
    calls: list[str] = []

    def counted(*arguments: Any) -> Any:
        calls.append(method)
        return replacement(*arguments)

    monkeypatch.setattr(owner, method, counted)
    dp = 2 if what == "gradients over replicas" and not LAYOUTS[layout].context else 1
    with pytest.raises(AssertionError, match=f"{layout} 1f1b ddp"):
        in_threads(Case(layout, "1f1b", "ddp", tied=False, grouped=True), dp=dp, updates=0, few=True)
    assert calls
