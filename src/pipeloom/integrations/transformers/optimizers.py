"""Optimizers of Trainer over the parameters of one process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.training import Pipeline


class NamedParameters(nn.Module):
    """The parameters of this process's optimizer, for what asks a model for them.

    Args:
        pipe: the pipeline.
        model: the whole model.
    """

    def __init__(self, pipe: Pipeline, model: nn.Module) -> None:
        super().__init__()
        self._parts = (pipe, model)  # in a tuple: they are no submodules

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self._parts[1]

    def named_parameters(self, *args: Any, **settings: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parts[0].named_parameters()


def keep_own_parameters(optimizer: torch.optim.Optimizer, pipe: Pipeline) -> None:
    """Leave an optimizer over all parameters of the model those of this process.

    Raises:
        InputError: it lacks a parameter that this process updates, such as a shard.
    """
    held = set(pipe.parameters())
    if not held <= {parameter for group in optimizer.param_groups for parameter in group["params"]}:
        raise InputError(
            "optimizers=: this optimizer lacks parameters that the pipeline updates, such as shards or masters. Pass "
            "optimizer_cls_and_kwargs= in its place."
        )
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in held]


def widen_gradients(optimizer: torch.optim.Optimizer, args: Any = None, kwargs: Any = None) -> None:
    """Gradients of 16 bits in the format of their main parameters, as torch's optimizers need them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                wide = parameter.grad.to(parameter.dtype)
                parameter.grad = None
                parameter.grad = wide
