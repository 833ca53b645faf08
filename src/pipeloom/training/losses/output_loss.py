"""The loss among the results of a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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


def values_of(output: Any) -> list[Any]:
    """What a dict, tuple or list of results holds."""
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]


def is_scalar(value: Any) -> bool:
    """Whether it is a number with a gradient, or could have one."""
    return isinstance(value, Tensor) and value.is_floating_point() and not value.dim()
