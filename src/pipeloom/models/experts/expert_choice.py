# ruff: noqa: N803  # shapes are part of the names
"""The router expert-choice: experts choose tokens (arXiv:2202.09368)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.models.experts.router import Router
from pipeloom.models.experts.routing import Routing


class ExpertChoice(Router):
    """Each expert takes the tokens of a group with its largest gates (section 3.2).

    The gates are a softmax over experts, not normalized again. All loads are equal without a loss; a token may have
    any number of experts, also none. Whether a token is taken depends on later tokens of the group: in a causal model,
    it sees the future, so its losses are not those of generating text.
    """

    sliceable = "chooses among all tokens of a sequence, so its result on parts of one would differ"

    def forward(self, x_NW: Tensor, groups: int = 1) -> Routing:
        N, E = x_NW.shape[0], self.settings.experts
        logits_NE = self.logits(x_NW)
        share_NE = F.softmax(logits_NE, -1)
        capacity = self.capacity(x_NW, groups)
        assert capacity is not None
        gate_EGC, place_EGC = share_NE.view(groups, N // groups, E).permute(2, 0, 1).topk(capacity, -1)
        first_G1 = (N // groups) * torch.arange(groups, device=x_NW.device).unsqueeze(1)
        token_A = (place_EGC + first_G1).flatten()
        counts_E = torch.full((E,), groups * capacity, device=x_NW.device)
        routing = Routing(token_A, gate_EGC.flatten(), counts_E)
        routing = self.finished(routing, logits_NE, share_NE, chosen_E=counts_E)
        untaken = (torch.bincount(token_A, minlength=N) == 0).sum()
        routing.observed = {**routing.observed, "untaken": untaken}
        return routing
