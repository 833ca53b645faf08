# ruff: noqa: N803  # shapes are part of the names
"""The routers: which experts a token gets, by which gates. `make_router` makes one by name.

Shapes: see `pipeloom.models.experts.routing`. Gates are computed in float32 (float64 for float64 tokens), also under
autocast (Switch, arXiv:2101.03961, section 2.4).
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.models.experts.routing import Routing, assign
from pipeloom.models.experts.settings import ExpertSettings


class Router(nn.Module):
    """Tokens [N, W] -> `Routing`.

    Attributes:
        weight: [E, W].
        draws: whether training draws random numbers.
        init_std: standard deviation of initial values by parameter, for `pipeloom.models.init_parameters`.
    """

    draws: ClassVar[bool] = False

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.experts, width))
        self.init_std: dict[str, float] = {}

    def forward(self, x_NW: Tensor, groups: int) -> Routing:
        """Route tokens of which each group of N / `groups` has its own capacity and balance."""
        raise NotImplementedError

    def logits(self, x_NW: Tensor, weight_EW: Tensor | None = None) -> Tensor:
        """[N, E], in float32 or float64."""
        dtype = torch.promote_types(x_NW.dtype, torch.float32)
        with torch.autocast(x_NW.device.type, enabled=False):
            return F.linear(x_NW.to(dtype), (self.weight if weight_EW is None else weight_EW).to(dtype))

    def extra_repr(self) -> str:
        return f"{self.settings.router}, experts={self.settings.experts}, top_k={self.settings.top_k}"


class TopK(Router):
    """Softmax over all experts; the `top_k` largest gates, normalized to 1; no drops unless a capacity is set.

    Mixtral (arXiv:2401.04088, section 2.1) takes the softmax of the largest logits, which is equal.
    """

    def forward(self, x_NW: Tensor, groups: int) -> Routing:
        settings = self.settings
        share_NE = F.softmax(self.logits(x_NW), -1)
        gate_NK, expert_NK = share_NE.topk(settings.top_k, -1)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        capacity = settings.capacity(x_NW.shape[0] // groups)
        return assign(expert_NK, gate_NK, settings.experts, groups=groups, capacity=capacity)


_ROUTERS: dict[str, type[Router]] = {"topk": TopK}


def make_router(width: int, settings: ExpertSettings) -> Router:
    """The router that `settings` names."""
    return _ROUTERS[settings.router](width, settings)
