"""`Lion`: an optimizer with one state per parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): the sign of a moving average, with decoupled weight decay.

    Its only state is the momentum, in the format of the parameter. Updates are elementwise, so they do not depend on
    how parameters are sharded.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; the paper uses 3 to 10 times less than with AdamW.
        betas: decays of the average in the update, and of the momentum.
        weight_decay: the paper uses 3 to 10 times more than with AdamW.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                momentum = state["exp_avg"]
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(momentum.lerp(gradient, 1 - first).sign_(), alpha=-rate)
                momentum.lerp_(gradient, 1 - second)
        return loss
