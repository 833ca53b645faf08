# ruff: noqa: N803  # shapes are part of the names
"""The router noisy-topk (Shazeer et al., arXiv:1701.06538)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.models.experts.router import RandomRouter, chosen_per_expert
from pipeloom.models.experts.routing import Routing, assign
from pipeloom.models.experts.settings import ExpertSettings

_LEAST_STD = 1e-2


class NoisyTopK(RandomRouter):
    """Softmax of the `top_k` largest of logits + normal noise * (softplus(x @ noise.T) + 0.01) (section 2.1).

    Unlike in the paper, the standard deviation is at least 0.01: the load loss divides by it.

    In evaluation there is no noise. Two losses balance the experts (section 4 and appendix A): the squared coefficient
    of variation of the importance, the sum of gates over tokens, and of the load, the expected number of tokens if the
    noise of one expert were drawn again. Both have the weight 0.1 by default. `weight` and `noise` start at 0, so the
    first choices are random (appendix A).

    Attributes:
        noise: [E, W].
    """

    sliceable = True

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__(width, settings)
        self.noise = nn.Parameter(torch.empty(settings.experts, width))
        self.init_std |= {"weight": 0.0, "noise": 0.0}

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn_like(like)

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        E, K = self.settings.experts, self.settings.top_k
        clean_NE = self.logits(x_NW)
        std_NE = F.softplus(self.logits(x_NW, self.noise)) + _LEAST_STD
        noisy_NE = clean_NE
        if self.training:
            noisy_NE = clean_NE + self.random(clean_NE) * std_NE
        best_NL, expert_NL = noisy_NE.topk(min(K + 1, E), -1)
        expert_NK = expert_NL[:, :K]
        gate_NK = F.softmax(best_NL[:, :K], -1)
        routing = assign(expert_NK, gate_NK, E, groups=groups, capacity=self.capacity(x_NW, groups))
        gate_NE = torch.zeros_like(clean_NE).scatter(1, expert_NK, gate_NK)
        losses = {"importance": _squared_variation(gate_NE, groups)}
        if K < E:  # else every expert has every token
            losses["load"] = _squared_variation(_probability_chosen(clean_NE, noisy_NE, std_NE, best_NL), groups)
        chosen_E = chosen_per_expert(expert_NK, E)[0]
        return self.finished(routing, clean_NE, F.softmax(clean_NE, -1), chosen_E=chosen_E, losses=losses)


def _probability_chosen(clean_NE: Tensor, noisy_NE: Tensor, std_NE: Tensor, best_NL: Tensor) -> Tensor:
    """P(x, i), the probability that expert i is chosen if its noise alone is drawn again (equations 8 and 9).

    The noise must lift it above the K-th largest of the other experts: of an expert among the best K, that is the
    largest one that was not chosen, of another the smallest one that was.
    """
    inside, outside = best_NL[:, -1:], best_NL[:, -2:-1]
    threshold_NE = torch.where(noisy_NE > inside, inside, outside)
    return 0.5 * (1 + torch.erf((clean_NE - threshold_NE) / std_NE / math.sqrt(2)))


def _squared_variation(value_NE: Tensor, groups: int) -> Tensor:
    """Squared coefficient of variation, over experts, of the sum over tokens; mean over groups."""
    total_GE = value_NE.reshape(groups, -1, value_NE.shape[1]).sum(1)
    return (total_GE.var(1, correction=0) / (total_GE.mean(1).square() + 1e-10)).mean()
