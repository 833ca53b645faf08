"""The comparison of the matrix notices what expert parallelism may get wrong: rows, weights of gradients, and sums."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeloom.engine.binders import computations
from pipeloom.parallel.data import replica_group, replica_groups
from pipeloom.parallel.expert import cutting, dispatch, exchange
from tests.cpu.expert_cases import Case, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EXCHANGED, EXCHANGE = exchange._exchanged, dispatch.exchange_rows
DECLARED, ALL_REDUCE = computations.add_declared, replica_group.ReplicaGroup.all_reduce


def _smaller_gradients(rows: Tensor, axis: Any, leaving: Any, arriving: Any) -> list[Tensor]:
    """1 / EP too much: as if experts' gradients were means over expert-parallel ranks."""
    found = EXCHANGED(rows, axis, leaving, arriving)
    return [piece / axis.degree for piece in found] if _in_backward() else found


def _gradients_that_stay(rows: Tensor, axis: Any, leaving: Any, arriving: Any) -> list[Tensor]:
    """In backwards, no gradient of another process arrives."""
    found = EXCHANGED(rows, axis, leaving, arriving)
    return [piece * (at == axis.index) for at, piece in enumerate(found)] if _in_backward() else found


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_calls = threading.local()


def _no_way_back(rows: Tensor, axis: Any, leaving: Any, arriving: Any = None) -> tuple[Tensor, list[int]]:
    """Every second exchange, of results, brings 0 from other processes."""
    found, sizes = EXCHANGE(rows, axis, leaving, arriving)
    _calls.number = getattr(_calls, "number", 0) + 1
    if _calls.number % 2:
        return found, sizes
    own = [found.new_full((size, 1), float(at == axis.index)) for at, size in enumerate(sizes)]
    return found * torch.cat(own), sizes


def _twice(state: Any, action: Any, roots: list[Any], gradients: list[Tensor]) -> None:
    first = len(roots)
    DECLARED(state, action, roots, gradients)
    gradients[first:] = [2 * gradient for gradient in gradients[first:]]


def _alone(group: replica_group.ReplicaGroup, values: Tensor) -> Any:
    return (lambda: None) if group._axes == ("edp",) else ALL_REDUCE(group, values)


def _of_every_replica(groups: replica_groups.ReplicaGroups, parameter: Any) -> replica_group.ReplicaGroup:
    return groups.every


# What is replaced, its replacement, and where that is noticed: layout, recomputation.
SABOTAGE: dict[str, tuple[Any, str, Callable[..., Any], str, str]] = {
    "1 / EP": (exchange, "_exchanged", _smaller_gradients, "ep 2", "none"),
    "gradients that stay": (exchange, "_exchanged", _gradients_that_stay, "ep 2", "none"),
    "no way back": (dispatch, "exchange_rows", _no_way_back, "ep 2", "none"),
    "rows out of order": (dispatch, "permute_rows", lambda rows, order: rows, "ep 2", "none"),
    "an auxiliary loss twice": (computations, "add_declared", _twice, "ep 2", "full"),
    "gates not summed": (dispatch, "copy_to", lambda x, axis: x, "ep 2 tp 2 sequence", "none"),
    "router counted twice": (cutting._EqualParts, "__call__", lambda hook, router, x: x, "ep 2 tp 2 sequence", "none"),
    "experts not summed": (replica_group.ReplicaGroup, "all_reduce", _alone, "ep 2 of 4", "none"),
    "experts summed with others": (replica_groups.ReplicaGroups, "of", _of_every_replica, "ep 2", "none"),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    owner, name, replacement, sharing, recompute = SABOTAGE[what]
    called: list[str] = []

    def counted(*arguments: Any) -> Any:
        called.append(name)
        return replacement(*arguments)

    monkeypatch.setattr(owner, name, counted)
    case = Case(sharing, "1f1b", "ddp", "drops", recompute, "counts")
    with pytest.raises(AssertionError, match=f"{sharing}, 1f1b, ddp"):
        in_threads(case, updates=1)
    assert called
