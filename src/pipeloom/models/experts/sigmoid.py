# ruff: noqa: N803  # shapes are part of the names
"""The router sigmoid: balance by a bias, without a loss (DeepSeek-V3, arXiv:2412.19437; arXiv:2408.15664)."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeloom.models.experts.router import Router, chosen_per_expert
from pipeloom.models.experts.routing import Routing, assign
from pipeloom.models.experts.settings import ExpertSettings


def moved_bias(bias_E: Tensor, chosen_E: Tensor, rate: float) -> Tensor:
    """The bias after a step in which experts were chosen so often: `rate` less above the mean load, more below it."""
    chosen_E = chosen_E.to(bias_E.device, torch.float64)
    return bias_E + rate * (chosen_E.mean() - chosen_E).sign().to(bias_E.dtype)


def keep_wide(module: nn.Module, name: str, apply: Callable[[], Any]) -> None:
    """Call `apply`, which changes dtypes or devices, but keep a bias in 32 bits: in 16, its small steps are lost."""
    before = getattr(module, name).detach()
    apply()
    after = getattr(module, name)
    if after.dtype.itemsize < 4:
        after.data = before.to(after.device, torch.promote_types(before.dtype, torch.float32))


class Sigmoid(Router):
    """Gates are sigmoids, normalized over the chosen experts; a bias per expert takes part in choosing alone.

    DeepSeek-V3, section 2.1.2, equations 13 to 16: after each step, the bias of an expert with more than the mean load
    falls by `bias_rate`, and that of one with less rises by as much. The loads are those of all replicas, so the bias
    is equal everywhere; it is a buffer, in checkpoints. It has 32 bits also in modules of 16.

    Attributes:
        bias: [E].
        bias_rate: 0.001, the paper's gamma.
        gate_scale: factor of all gates; 1.
    """

    sliceable = True
    bias: Tensor
    bias_rate = 0.001
    gate_scale = 1.0

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__(width, settings)
        self.register_buffer(
            "bias", torch.zeros(settings.experts, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        )

    def reset_buffers(self) -> None:
        """Set the bias to 0."""
        self.bias.zero_()

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        settings = self.settings
        logits_NE = self.logits(x_NW)
        score_NE = logits_NE.sigmoid()
        expert_NK = (score_NE.detach() + self.bias).topk(settings.top_k, -1).indices
        gate_NK = score_NE.gather(1, expert_NK)
        gate_NK = gate_NK / (gate_NK.sum(-1, keepdim=True) + 1e-20)
        if self.gate_scale != 1:
            gate_NK = gate_NK * self.gate_scale
        routing = assign(expert_NK, gate_NK, settings.experts, groups=groups, capacity=self.capacity(x_NW, groups))
        share_NE = score_NE.detach() / (score_NE.detach().sum(-1, keepdim=True) + 1e-20)
        chosen_E = chosen_per_expert(expert_NK, settings.experts)[0]
        return self.finished(routing, logits_NE, share_NE, chosen_E=chosen_E)

    @torch.no_grad()
    def move_bias(self, observed: Mapping[str, Tensor]) -> None:
        """Move the bias by the loads of a step: ``observed["chosen"]`` [E], of all micro-batches and replicas."""
        if (chosen_E := observed.get("chosen")) is not None:  # else the layer has not run yet
            self.bias.copy_(moved_bias(self.bias, chosen_E, self.bias_rate))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        keep_wide(self, "bias", lambda: super(Sigmoid, self)._apply(fn, recurse))  # type: ignore[no-untyped-call]
        return self
