# ruff: noqa: N803  # shapes are part of the names
"""`Router`: what all routers share.

Shapes: see `pipeloom.models.experts.routing`. Gates are computed in float32 (float64 for float64 tokens), also under
autocast (Switch, arXiv:2101.03961, section 2.4).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.models.experts.routing import Routing
from pipeloom.models.experts.settings import ROUTERS, ExpertSettings
from pipeloom.slicing.dropout_parts import dropout_parts


class Router(nn.Module, ABC):
    """Tokens [N, W] -> `Routing`.

    Attributes:
        weight: [E, W].
        draws_random_numbers: whether training draws random numbers, from torch's generator as dropout does.
        init_std: standard deviation of initial values by parameter, for `pipeloom.models.init_parameters`.
    """

    sliceable: bool | str = True

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings = settings
        self.sliceable = type(self).sliceable  # a forward of a subclass would need a declaration of its own
        self.draws_random_numbers = ROUTERS[settings.router].draws
        self.weight = nn.Parameter(torch.empty(settings.experts, width))
        self.init_std: dict[str, float] = {}

    @abstractmethod
    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        """Route tokens of which each group of N / `groups` has its own capacity and balance."""

    def logits(self, x_NW: Tensor, weight_EW: Tensor | None = None) -> Tensor:
        """[N, E], in float32 or float64."""
        dtype = torch.promote_types(x_NW.dtype, torch.float32)
        weight_EW = self.weight if weight_EW is None else weight_EW
        if not torch.is_autocast_enabled(x_NW.device.type):
            return F.linear(x_NW.to(dtype), weight_EW.to(dtype))
        with torch.autocast(x_NW.device.type, enabled=False):
            return F.linear(x_NW.to(dtype), weight_EW.to(dtype))

    def capacity(self, x_NW: Tensor, groups: int) -> int | None:
        """Assignments that an expert takes of each group."""
        return self.settings.capacity(x_NW.shape[0] // groups)

    def finished(
        self,
        routing: Routing,
        logits_NE: Tensor,
        share_NE: Tensor,
        *,
        chosen_E: Tensor,
        losses: Mapping[str, Tensor] | None = None,
    ) -> Routing:
        """`routing` with its losses, and with what is observed.

        Args:
            logits_NE: before the softmax.
            share_NE: how the router divides each token between all experts; rows add up to 1.
            chosen_E: assignments per expert before drops.
            losses: balance losses, without their weight.
        """
        settings, tokens = self.settings, max(1, logits_NE.shape[0])
        weighted = {name: (value, settings.balance_weight) for name, value in (losses or {}).items()}
        if settings.z_loss_weight:
            weighted["z"] = (logits_NE.logsumexp(-1).square().sum() / tokens, settings.z_loss_weight)
        routing.losses = weighted
        with torch.no_grad():
            routing.observed = {
                "chosen": chosen_E,
                "dropped": chosen_E.sum() - routing.counts.sum(),
                "tokens": torch.tensor(logits_NE.shape[0], device=logits_NE.device),
                "entropy": torch.special.entr(share_NE).sum(),
            }
        return routing

    def extra_repr(self) -> str:
        return f"{self.settings.router}, experts={self.settings.experts}, top_k={self.settings.top_k}"


class RandomRouter(Router):
    """A router that draws random numbers in training."""

    @abstractmethod
    def draw(self, like: Tensor) -> Tensor:
        """Random numbers of shape, dtype and device of `like`, from the router's distribution."""

    def random(self, like: Tensor) -> Tensor:
        """`draw`. Raises InputError where tensor-parallel ranks are threads, so that their numbers would differ."""
        if dropout_parts(self).one_generator:
            raise InputError(
                f"router {self.settings.router!r} on tensor-parallel ranks that are threads: they draw from one "
                "generator, so their random numbers would differ. Use processes, or router 'topk'."
            )
        return self.draw(like)


def largest(share_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row and their indices, [N, k] each, in descending order."""
    if k > 2:
        return tuple(share_NE.topk(k, -1))  # type: ignore[return-value]
    with torch.no_grad():
        index_NK = share_NE.max(-1, keepdim=True).indices  # several times as fast as topk on the CPU
        if k == 2:
            rest_NE = share_NE.scatter(1, index_NK, -torch.inf)
            index_NK = torch.cat([index_NK, rest_NE.max(-1, keepdim=True).indices], 1)
    return share_NE.gather(1, index_NK), index_NK


def chosen_per_expert(expert_NK: Tensor, experts: int, groups: int = 1) -> Tensor:
    """How many of the choices [N, K] of each group are for each expert: [G, E] int64."""
    expert_GC = expert_NK.reshape(groups, -1)
    if groups > 1:
        expert_GC = expert_GC + experts * torch.arange(groups, device=expert_NK.device).unsqueeze(1)
    return torch.bincount(expert_GC.flatten(), minlength=groups * experts).view(groups, experts)


def mean_share(share_NE: Tensor, groups: int) -> Tensor:
    """The mean over the tokens of each group: [N, E] -> [G, E]; 0 without tokens."""
    share_GTE = share_NE.reshape(groups, share_NE.shape[0] // groups, share_NE.shape[1])
    return share_GTE.sum(1) / max(1, share_GTE.shape[1])


def switch_balance(chosen_GE: Tensor, share_GE: Tensor) -> Tensor:
    """E * sum over experts of f_e * P_e (Switch, arXiv:2101.03961, equations 4 to 6); mean over groups.

    f_e is the share of all choices that are for e, before drops; P_e is the mean of the token's shares. Even loads give
    1, for any number of choices per token.
    """
    chosen_share_GE = chosen_GE.to(share_GE.dtype) / chosen_GE.sum(1, keepdim=True).clamp(min=1)
    return chosen_GE.shape[1] * (chosen_share_GE * share_GE).sum(1).mean()
