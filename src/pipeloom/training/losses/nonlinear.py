"""`is_nonlinear`: whether a loss is a root, a ratio or a product of numbers that samples make, as of a Dice loss."""

from collections.abc import Set
from typing import Any

from torch import Tensor, nn

from pipeloom.training.losses.reductions import is_linear, kind_of

_MOST_OF_PARAMETERS = 6  # nodes of a number that is made of parameters alone, such as their norm


def is_nonlinear(loss: Tensor, calls: Set[Any]) -> bool:
    """Whether the loss of a batch is not the mean of losses, whatever their weights.

    Args:
        loss: one number, with its graph.
        calls: nodes of losses of torch.nn.functional.
    """
    todo: list[Any] = [loss.grad_fn]
    visited = set(todo)
    while todo:
        node = todo.pop()
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        if node in calls or not inputs or any(_shape(edge) for edge in inputs):
            continue
        factors = [_follows_from_samples(edge[0]) for edge in inputs]
        kind = kind_of(node)
        if (not is_linear(node) and any(factors)) or (kind in ("Mul", "Div") and sum(factors) > 1):
            return True
        if kind == "Div" and node.next_functions[1][0] is not None and factors[-1]:
            return True
        new = [each for each, _ in inputs if each not in visited]
        visited.update(new)
        todo += new
    return False


def _shape(edge: tuple[Any, int]) -> tuple[int, ...]:
    node, place = edge
    return tuple(node.variable.shape) if hasattr(node, "variable") else tuple(node._input_metadata[place].shape)


def _follows_from_samples(node: Any) -> bool:
    """Whether a number depends on more than parameters."""
    todo, visited = [node], {node}
    while todo:
        leaf = getattr(todo[-1], "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            return True
        new = [each for each, _ in todo.pop().next_functions if each is not None and each not in visited]
        visited.update(new)
        todo += new
        if len(visited) > _MOST_OF_PARAMETERS:
            return True
    return False
