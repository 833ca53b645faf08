"""`OutputLoss`: the loss that a model returns among its results."""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.split.traced.stage import TracedStage


class OutputLoss:
    """The loss in the output of a traced model: under "loss" in a dict, or the only number in a tuple.

    Losses are means over the samples of micro-batches.
    """

    @classmethod
    def of(cls, stage: nn.Module) -> Self | None:
        """The loss of a model whose last stage this is; None: its output has none."""
        if not isinstance(stage, TracedStage):
            return None
        return None if loss_of_output(stage.numbers()) is None else cls()

    def __call__(self, output: Any, targets: Any) -> dict[str, Any]:
        """The loss, and other scalars of a dict as metrics."""
        loss = loss_of_output(output)
        if loss is None:
            raise InputError("the model returned no loss in this mode. Pass loss_fn to Pipeline.")
        named = output if isinstance(output, Mapping) else {}
        return {"loss": loss, **{name: value for name, value in named.items() if name != "loss" and is_scalar(value)}}


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
