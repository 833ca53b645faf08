# ruff: noqa: N803  # shapes are part of the names
"""The routers whose gates are a softmax over all experts: topk, switch, gshard and glam."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.models.experts.router import RandomRouter, Router, chosen_per_expert, largest, mean_share, switch_balance
from pipeloom.models.experts.routing import Routing, assign
from pipeloom.models.experts.settings import ExpertSettings
from pipeloom.models.initialization import STD


class TopK(Router):
    """The `top_k` largest gates of each token, normalized to 1; no drops unless a capacity is set.

    Mixtral (arXiv:2401.04088, section 2.1) takes the softmax of the largest logits, which is equal. The balance loss is
    that of Switch with f_e over all choices.
    """

    sliceable = True

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        settings = self.settings
        logits_NE = self.logits(x_NW)
        share_NE = F.softmax(logits_NE, -1)
        gate_NK, expert_NK = largest(share_NE, settings.top_k)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        routing = assign(expert_NK, gate_NK, settings.experts, groups=groups, capacity=self.capacity(x_NW, groups))
        chosen_GE = chosen_per_expert(expert_NK, settings.experts, groups)
        losses = {"balance": switch_balance(chosen_GE, mean_share(share_NE, groups))}
        return self.finished(routing, logits_NE, share_NE, chosen_E=chosen_GE.sum(0), losses=losses)


class Switch(RandomRouter):
    """One expert per token, its gate not normalized (Switch, arXiv:2101.03961, sections 2.2 and 2.4).

    In training, the router's input is multiplied by numbers drawn from U(1 - jitter, 1 + jitter). Initial values have a
    tenth of the variance that those of the other routers have; the experts' too.

    Attributes:
        jitter: 0.01.
    """

    sliceable = True

    jitter = 0.01

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__(width, settings)
        self.init_std["weight"] = STD * 0.1**0.5

    def draw(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).uniform_(1 - self.jitter, 1 + self.jitter)

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        settings = self.settings
        x_NW = x_NW.to(torch.promote_types(x_NW.dtype, torch.float32))
        if self.training:
            x_NW = x_NW * self.random(x_NW)
        logits_NE = self.logits(x_NW)
        share_NE = F.softmax(logits_NE, -1)
        gate_NK, expert_NK = largest(share_NE, 1)
        routing = assign(expert_NK, gate_NK, settings.experts, groups=groups, capacity=self.capacity(x_NW, groups))
        chosen_GE = chosen_per_expert(expert_NK, settings.experts, groups)
        losses = {"balance": switch_balance(chosen_GE, mean_share(share_NE, groups))}
        return self.finished(routing, logits_NE, share_NE, chosen_E=chosen_GE.sum(0), losses=losses)


class GShard(RandomRouter):
    """Two experts per token, with gates normalized to 1 (GShard, arXiv:2006.16668, section 2.2 and algorithm 1).

    All first choices of a group take their places before all second choices. In training, a second choice of gate g is
    sent with probability min(1, 2 g); in evaluation, always. A choice that is not sent takes no place, as in the
    authors' code. The balance loss is 1/E * sum over experts of c_e / S * m_e: c_e first choices for e of S tokens,
    before drops, and m_e the mean gate. Its weight is by default 0.01 * E**2, the factor of the authors' code.
    """

    sliceable = True

    def draw(self, like: Tensor) -> Tensor:
        return torch.rand_like(like)

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        E = self.settings.experts
        logits_NE = self.logits(x_NW)
        share_NE = F.softmax(logits_NE, -1)
        gate_NK, expert_NK = largest(share_NE, 2)
        gate_NK = gate_NK / gate_NK.sum(-1, keepdim=True)
        sent_NK = self.sent(gate_NK)
        routing = assign(expert_NK, gate_NK, E, groups=groups, capacity=self.capacity(x_NW, groups), sent_NK=sent_NK)
        first_GE = chosen_per_expert(expert_NK[:, :1], E, groups)
        tokens = max(1, x_NW.shape[0] // groups)
        balance = (first_GE.to(share_NE.dtype) / tokens * mean_share(share_NE, groups)).sum(1).mean() / E
        if sent_NK is None:
            chosen_E = chosen_per_expert(expert_NK, E)[0]
        else:
            chosen_E = torch.bincount(expert_NK.flatten(), sent_NK.flatten().double(), minlength=E).long()
        return self.finished(routing, logits_NE, share_NE, chosen_E=chosen_E, losses={"balance": balance})

    def sent(self, gate_NK: Tensor) -> Tensor | None:
        """[N, 2], which choices are sent; None: all."""
        if not self.training:
            return None
        second_N = gate_NK[:, 1]
        second_N = 2 * second_N > self.random(second_N)
        return torch.stack([torch.ones_like(second_N), second_N], 1)


class GLaM(GShard):
    """GShard's router with every second choice sent (GLaM, arXiv:2112.06905, section 4).

    GLaM has 64 experts, two per token, in every other block: ``experts=64, experts_every=2``.
    """

    def sent(self, gate_NK: Tensor) -> Tensor | None:
        return None
