"""Modules around cut parameters, as the plans of transformers name them: hooks in front of a module and behind it.

sum      f on what the module reads, g on its result: its parameters are cut, so each process has a part
share    1/t of what the module reads, inside of a module whose results are summed: an expert without weights
latent   f on the last outputs alone: keys that all heads share, beside a latent that enters column layers
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import copy_to, reduce_from


def sum_module(module: nn.Module, axis: Axis) -> None:
    """Sum the results of a module whose parameters are cut, and the gradients of what it reads."""
    module.register_forward_pre_hook(_Enter(axis), with_kwargs=True)
    module.register_forward_hook(_Leave(axis))


def share_input(module: nn.Module, axis: Axis) -> None:
    """Let a module read its input divided by the number of processes."""
    module.register_forward_pre_hook(_Share(axis))


def enter_last(module: nn.Module, axis: Axis, features: int) -> None:
    """Sum the gradients of the last features of a module's output."""
    module.register_forward_hook(_EnterLast(axis, features))


class _Enter:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda x: copy_to(x, self._axis) if x.is_floating_point() else x, (args, kwargs))


class _Leave:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        return tree_map_only(Tensor, lambda y: reduce_from(y, self._axis), result)


class _Share:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] / self._axis.degree, *args[1:])


class _EnterLast:
    def __init__(self, axis: Axis, features: int) -> None:
        self._axis, self._features = axis, features

    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        rest, last = torch.split(result, [result.shape[-1] - self._features, self._features], -1)
        return torch.cat([rest, copy_to(last, self._axis)], -1)
