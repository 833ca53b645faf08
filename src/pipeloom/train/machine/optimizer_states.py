"""`state_bytes`: what an optimizer keeps, found by a step of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.optimizers import HIDDEN, make_optimizer


class _Ones(TorchFunctionMode):
    """Numbers that a step reads from tensors are 1: fake tensors have none."""

    def __torch_function__(
        self, function: Any, types: Sequence[Any], arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        return 1.0 if function is torch.Tensor.item else function(*arguments, **(options or {}))


def state_bytes(config: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the tensors that the optimizer of `pipeloom train` keeps between steps, without counters of steps.

    The optimizer itself makes a step, on tensors that have shapes and no memory, so any model is measured in no time.

    Args:
        config: which optimizer.
        shapes: of float32 parameters, by name in the model.
    """
    kinds = Counter((shape, name.startswith(HIDDEN)) for name, shape in shapes.items())
    total = 0
    for (shape, hidden), count in kinds.items():
        with FakeTensorMode(), _Ones():
            parameter = nn.Parameter(torch.empty(shape))
            parameter.grad = torch.empty_like(parameter)
            optimizer = make_optimizer([(f"{HIDDEN if hidden else ''}0", parameter)], config)
            optimizer.step()
            states = (value for state in optimizer.state.values() for value in state.values())
            total += count * sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim())
    return total
