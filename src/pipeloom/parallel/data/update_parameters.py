"""An optimizer's update by gradients of 16 bits, under main parameters of 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_GROUP_ELEMENTS = 2**22


def update_parameters(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, also for gradients of 16 bits under masters of 32 (see `pipeloom.Precision`).

    torch's optimizers want both in one format. So that gradients never all exist in 32 bits at once, the update goes
    through the parameters in groups of about `_GROUP_ELEMENTS`; hooks on the optimizer's step run once for each. An
    optimizer that goes through them in portions of its own (`pipeloom.OffloadedOptimizer`) widens those itself.
    """
    given = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    narrow = [(parameter, gradient) for parameter, gradient in given if gradient.dtype != parameter.dtype]
    if not narrow or getattr(optimizer, "widens_gradients", False):
        optimizer.step()
        return
    same = [(parameter, gradient) for parameter, gradient in given if gradient.dtype == parameter.dtype]
    groups: list[list[tuple[nn.Parameter, Tensor]]] = [same] if same else []
    size = _GROUP_ELEMENTS
    for parameter, gradient in narrow:
        if size >= _GROUP_ELEMENTS:
            groups.append([])
            size = 0
        groups[-1].append((parameter, gradient))
        size += gradient.numel()
    for parameter, _ in given:
        parameter.grad = None
    for group in groups:
        for parameter, gradient in group:
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        for parameter, _ in group:
            parameter.grad = None
    for parameter, gradient in given:
        parameter.grad = gradient
