# ruff: noqa: N803  # shapes are part of the names
"""`Experts`: a layer of experts and its router, in place of the MLP of a block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.autograd.auxiliary_losses import auxiliary_loss, observe
from pipeloom.autograd.grouped_linear import grouped_linear
from pipeloom.errors import InputError
from pipeloom.models.experts.routers import make_router
from pipeloom.models.experts.routing import Compute, Routing, dispatch_here
from pipeloom.models.experts.settings import ExpertSettings, check_integer
from pipeloom.models.experts.sigmoid import Sigmoid
from pipeloom.models.initialization import STD


def _unchanged(x: Tensor) -> Tensor:
    return x


class Experts(nn.Module):
    """Tokens [B, S, W] -> [B, S, W]: each token goes through the experts that the router chooses, by their gates.

    An expert is a linear layer, an activation and another linear layer without biases. The matrices of all experts lie
    in one 3-D parameter each. Tokens that no expert takes get 0, so the residual stream carries them on.

    A forward declares the router's losses (`pipeloom.auxiliary_loss`) as "balance" (of noisy-topk "importance" and
    "load") and "z", and reports (`pipeloom.observe`) "chosen", "dropped", "tokens" and "entropy", see
    `pipeloom.models.experts.Routing`.

    Args:
        width: W.
        experts: number of routed experts, E.
        expert_width: F, the width inside an expert.
        router: "switch", "gshard", "glam", "noisy-topk", "topk", "sigmoid" or "expert-choice"; see
            `pipeloom.models.experts.routers`.
        top_k: experts per token; None: the router's, 1 for switch, else 2.
        capacity_factor: an expert takes ceil(top_k * tokens / experts * capacity_factor) of a group of tokens; None:
            the router's, or no limit.
        capacity_by: the group: "batch", all tokens of a call (a micro-batch or slice); or "sequence".
        shared_experts: number of experts that every token goes through; they are one MLP of their summed width.
        balance_weight: weight of the load-balancing loss; None: the router's.
        z_loss_weight: weight of the mean of logsumexp(logits)**2 (ST-MoE, arXiv:2202.08906, section 3); 0: none.
        gated: whether experts are gated: silu(gate) * up, SwiGLU (arXiv:2002.05202).
        activation: of the experts; None: GELU, or SiLU with `gated`.
        down_std: standard deviation of the initial `down`.

    Attributes:
        router: has `weight` [E, W].
        up: [E, F, W]; with `gated`, `gate_up` [E, 2 F, W] instead, gates first.
        down: [E, W, F].
        shared_up, shared_down: linear layers of the shared experts; None without.
        dispatch: ``dispatch(x_NW, routing, compute)``: runs the experts and returns [N, W].
        enter, leave: what tokens [B, S, W] pass before they are routed, and results after. Expert and tensor
            parallelism replace these three.

    Raises:
        InputError: a value is out of range.
    """

    sliceable: bool | str = True
    dispatch: Callable[[Tensor, Routing, Compute], Tensor] = staticmethod(dispatch_here)
    enter: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    leave: Callable[[Tensor], Tensor] = staticmethod(_unchanged)

    def __init__(
        self,
        width: int,
        *,
        expert_width: int,
        shared_experts: int = 0,
        gated: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        down_std: float = STD,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings = ExpertSettings.of(**settings)
        check_integer("width", width, 1)
        check_integer("expert_width", expert_width, 1)
        check_integer("shared_experts", shared_experts, 0)
        if activation is not None and not callable(activation):
            raise InputError(f"activation={activation!r}: must be a function, such as torch.nn.functional.gelu.")
        experts, first = self.settings.experts, (2 if gated else 1) * expert_width
        self.gated = gated
        self.activation = activation or (F.silu if gated else F.gelu)
        self.router = make_router(width, self.settings)
        self.up = nn.Parameter(torch.empty(experts, first, width)) if not gated else None
        self.gate_up = nn.Parameter(torch.empty(experts, first, width)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, width, expert_width))
        self.shared_up: nn.Linear | None = None
        self.shared_down: nn.Linear | None = None
        if shared_experts:
            self.shared_up = nn.Linear(width, shared_experts * first, bias=False)
            self.shared_down = nn.Linear(shared_experts * expert_width, width, bias=False)
        scale = 0.1**0.5 if self.settings.router == "switch" else 1.0  # a tenth of the variance
        self.init_std = {"up": scale * STD, "gate_up": scale * STD, "down": scale * down_std, "shared_down": down_std}
        self.sliceable = self.router.sliceable
        if isinstance(self.router, Sigmoid):
            self.after_step = self.router.move_bias  # the observed loads are the layer's
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values of experts and router: normal, with standard deviation 0.02 or `init_std`.

        Switch's experts and router have a tenth of that variance; noisy-topk's router starts at 0.
        """
        for module, stds in ((self, self.init_std), (self.router, self.router.init_std)):
            for name, parameter in module.named_parameters(recurse=False):
                nn.init.normal_(parameter, std=stds.get(name, STD))

    @property
    def num_experts(self) -> int:
        """Number of routed experts of the layer in all processes."""
        return self.settings.experts

    @property
    def has_capacity(self) -> bool:
        """Whether an expert takes a limited number of tokens."""
        return self.settings.capacity(1) is not None

    def forward(self, x_BSW: Tensor) -> Tensor:
        all_BSW = self.enter(x_BSW)
        x_NW = all_BSW.reshape(-1, all_BSW.shape[-1])
        groups = max(1, all_BSW.shape[0]) if self.settings.capacity_by == "sequence" else 1
        routing = self.router(x_NW, groups)
        for name, (value, weight) in routing.losses.items():
            auxiliary_loss(value, weight, name, module=self)
        for name, values in routing.observed.items():
            observe(name, values, module=self)
        limit = self.settings.capacity(x_NW.shape[0] // groups)
        routing.capacity = None if limit is None else limit * groups
        y_BSW = self.leave(self.dispatch(x_NW, routing, self.compute).view_as(all_BSW))
        if self.shared_up is not None and self.shared_down is not None:
            y_BSW = y_BSW + self.shared_down(self.activated(self.shared_up(x_BSW)))
        return y_BSW

    def compute(self, rows_AW: Tensor, counts_E: Tensor) -> Tensor:
        """The experts of this process: rows [A, W] sorted by expert, and rows per expert, -> [A, W]."""
        first = self.gate_up if self.up is None else self.up
        assert first is not None
        return grouped_linear(self.activated(grouped_linear(rows_AW, first, counts_E)), self.down, counts_E)

    def activated(self, x: Tensor) -> Tensor:
        """[..., F] -> [..., F]; with gates, [..., 2 F] -> [..., F]."""
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, -1)
        return self.activation(gate) * up
