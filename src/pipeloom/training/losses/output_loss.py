"""The loss among the results of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeloom.autograd.loss_metrics import loss_in
from pipeloom.training.losses.reductions import is_linear
from pipeloom.transport.values import tensors_in


def loss_of_output(output: Any) -> Tensor | None:
    """The loss in a model's output: a number, the one under "loss", or the only number in a tuple."""
    if is_scalar(output):
        found: Tensor = output
        return found
    if isinstance(output, Mapping):
        loss = output.get("loss")
        return loss if is_scalar(loss) else None
    scalars = [value for value in values_of(output) if is_scalar(value)]
    return scalars[0] if len(scalars) == 1 else None


def is_of_output(loss: Tensor, output: Any) -> bool:
    """Whether a loss is made of numbers that are in the model's output alone."""
    numbers = {each.grad_fn for each in tensors_in(output) if is_scalar(each) and each.grad_fn is not None}
    todo: list[Any] = [loss.grad_fn]
    visited = set(todo)
    while todo:
        node = todo.pop()
        if node in numbers:
            continue
        if not numbers or not is_linear(node) or not node.next_functions:
            return False
        new = [each for each, _ in node.next_functions if each is not None and each not in visited]
        visited.update(new)
        todo += new
    return True


def or_zero(result: Any, labels: Tensor | None, ignored: int) -> Any:
    """The result with a loss of 0 where no label counts, which the host does not know."""
    loss = loss_in(result)
    if labels is None or not isinstance(loss, Tensor) or loss.numel() != 1:
        return result
    loss = torch.where((labels != ignored).any(), loss, torch.zeros_like(loss))
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss


def values_of(output: Any) -> list[Any]:
    """What a dict, tuple or list of results holds."""
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]


def is_scalar(value: Any) -> bool:
    """Whether it is a number with a gradient, or could have one."""
    return isinstance(value, Tensor) and value.is_floating_point() and not value.dim()
