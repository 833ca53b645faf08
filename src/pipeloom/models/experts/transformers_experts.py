# ruff: noqa: N803  # shapes are part of the names
"""Experts and routers of Hugging Face transformers, computed as those of `Experts`.

Mixtures of transformers 5 (Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS and others) have a router, which returns logits,
gates and chosen experts, and a module of fused experts:

    gate_up_proj   [E, 2 F, W], or [E, W, 2 F] if `is_transposed`; gates and values in halves or alternating
    down_proj      [E, W, F], or [E, F, W]
    gate_up_proj_bias, down_proj_bias    [E, 2 F] and [E, W], if `has_bias`

`take_over` changes the classes of these modules and leaves their parameters, names and settings as they are. Then each
expert is one product of all its tokens, weight gradients wait for W, and `dispatch` can be replaced. Experts of another
form, with the same forward, keep their own computation (`OwnExperts`).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.autograd.auxiliary_losses import auxiliary_loss, observe
from pipeloom.autograd.grouped_linear import grouped_linear
from pipeloom.errors import InputError
from pipeloom.models.experts.router import chosen_per_expert, switch_balance
from pipeloom.models.experts.routing import Compute, Routing, assign, dispatch_here
from pipeloom.models.experts.sigmoid import keep_wide, moved_bias

_BIAS = "e_score_correction_bias"  # DeepSeek-V3's, which takes part in choosing alone


def _unchanged(x: Tensor) -> Tensor:
    return x


class FusedExperts(nn.Module):
    """Base of the classes that `take_over` gives to modules of fused experts. Not to be made by itself.

    Attributes:
        num_experts: number of experts in all processes.
        dispatch: as that of `pipeloom.models.experts.Experts`.
    """

    sliceable = True
    has_capacity = False
    dispatch: Callable[[Tensor, Routing, Compute], Tensor] = staticmethod(dispatch_here)
    leave: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    num_experts: int
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [N, W], chosen experts [N, K] and their gates [N, K] -> [N, W]."""
        routing = assign(top_k_index, top_k_weights, self.num_experts)
        dispatch: Any = self.dispatch
        return self.leave(dispatch(hidden_states, routing, self.compute))

    @property
    def tensor_cuts(self) -> dict[str, tuple[int, int]]:
        """How experts are cut along tp: parameter -> dimension, and number of sections. Empty: they cannot be."""
        if getattr(self, "has_bias", False) or getattr(self, "has_post_expert_norm", False):
            return {}
        inner, outer = (2, 1) if getattr(self, "is_transposed", False) else (1, 2)
        halves = 2 if getattr(self, "is_concatenated", True) else 1
        return {"gate_up_proj": (inner, halves), "up_proj": (inner, 1), "down_proj": (outer, 1)}

    def compute(self, rows_AW: Tensor, counts_E: Tensor) -> Tensor:
        """The experts of this process: rows [A, W] sorted by expert, and rows per expert, -> [A, W]."""
        inside = self._linear("gate_up_proj", rows_AW, counts_E)
        gated: Tensor = getattr(self, "_apply_gate")(inside)  # noqa: B009  # of the class in transformers
        return self._linear("down_proj", gated, counts_E)

    def _linear(self, name: str, x_AK: Tensor, counts_E: Tensor) -> Tensor:
        transposed = bool(getattr(self, "is_transposed", False))
        result = grouped_linear(x_AK, getattr(self, name), counts_E, transposed=transposed)
        if not getattr(self, "has_bias", False):
            return result
        bias_EM: Tensor = getattr(self, f"{name}_bias")
        return result + bias_EM.repeat_interleave(counts_E, 0, output_size=result.shape[0]).to(result.dtype)


class OwnExperts(FusedExperts):
    """The same for experts of another form: each runs as in the class in transformers, with gates of 1."""

    def compute(self, rows_AW: Tensor, counts_E: Tensor) -> Tensor:
        """The experts of this process: rows [A, W] sorted by expert, and rows per expert, -> [A, W]."""
        rows = rows_AW.shape[0]
        if not rows:
            # With a graph, so that the backward of an exchange runs here too, and all parameters have gradients: ranks
            # that sum or shard them wait for each other's.
            none = [parameter[:0].sum() for parameter in self.parameters()]
            return rows_AW * 1.0 + torch.stack(none).sum().to(rows_AW.dtype)
        expert_A = torch.arange(counts_E.shape[0], device=rows_AW.device)
        expert_A = expert_A.repeat_interleave(counts_E, output_size=rows)
        own: Any = super(FusedExperts, self).forward
        result: Tensor = own(rows_AW, expert_A[:, None], rows_AW.new_ones(rows, 1))
        return result


class DeclaringRouter(nn.Module):
    """Base of the classes that `take_over` gives to routers: they declare losses and report loads. Not to be made.

    The names are those of `pipeloom.models.experts.Experts`. Gates and chosen experts are those of the class in
    transformers. The bias of a router with `e_score_correction_bias` is moved after each step, as in `Sigmoid`.
    """

    sliceable = True
    balance_weight = 0.0
    z_loss_weight = 0.0
    bias_rate = 0.001

    def forward(self, hidden_states: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, E], gates [N, K] and chosen experts [N, K]; some families pass further arguments."""
        logits_NE, gate_NK, expert_NK = super().forward(hidden_states, *args, **settings)
        of_sigmoids = hasattr(self, _BIAS)
        score_NE = logits_NE.float().sigmoid() if of_sigmoids else F.softmax(logits_NE.float(), -1)
        share_NE = score_NE / score_NE.sum(-1, keepdim=True)
        chosen_GE = chosen_per_expert(expert_NK, logits_NE.shape[1])
        if self.balance_weight:
            mean_GE = share_NE.mean(0, keepdim=True)
            auxiliary_loss(switch_balance(chosen_GE, mean_GE), self.balance_weight, "balance", module=self)
        if self.z_loss_weight:
            auxiliary_loss(logits_NE.float().logsumexp(-1).square().mean(), self.z_loss_weight, "z", module=self)
        with torch.no_grad():
            observe("chosen", chosen_GE[0], module=self)
            observe("dropped", torch.zeros((), dtype=torch.int64, device=logits_NE.device), module=self)
            observe("tokens", torch.tensor(logits_NE.shape[0], device=logits_NE.device), module=self)
            observe("entropy", torch.special.entr(share_NE).sum(), module=self)
        return logits_NE, gate_NK, expert_NK


class _BiasRouter(DeclaringRouter):
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        keep_wide(self, _BIAS, lambda: super(_BiasRouter, self)._apply(fn, recurse))  # type: ignore[no-untyped-call]
        return self

    @torch.no_grad()
    def after_step(self, observed: Mapping[str, Tensor]) -> None:
        """Move the bias by the loads of a step, see `Sigmoid.move_bias`."""
        bias: Tensor = getattr(self, _BIAS)
        if (chosen_E := observed.get("chosen")) is not None:  # else the layer has not run yet
            bias.copy_(moved_bias(bias, chosen_E, self.bias_rate))


def take_over(model: nn.Module, *, balance_weight: float = 0.0, z_loss_weight: float = 0.0) -> list[str]:
    """Compute the experts of a model of transformers as those of `Experts`. Parameters and their names stay.

    A step of a pipeline then moves the `e_score_correction_bias` of DeepSeek-V3's routers by 0.001 towards equal loads.

    Args:
        model: the model, or a part of it.
        balance_weight, z_loss_weight: of the losses that its routers declare; 0: none. Models of transformers add the
            former to their own loss if they are given ``output_router_logits``; then leave it out here.

    Returns:
        The names of the modules of experts.

    Raises:
        InputError: the model has no fused experts.
    """
    found = fused_experts(model)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts with fused weights gate_up_proj and down_proj [experts, ..., ...]. "
            "Name a mixture of experts of transformers 5."
        )
    weighted = balance_weight or z_loss_weight
    for name in found:
        make_dispatching(model.get_submodule(name))
        known = False
        for router in model.get_submodule(name.rpartition(".")[0]).children():
            if hasattr(router, "top_k") and isinstance(getattr(router, "weight", None), nn.Parameter):
                if not isinstance(router, DeclaringRouter):
                    base = _BiasRouter if hasattr(router, _BIAS) else DeclaringRouter
                    router.__class__ = _joined(base, type(router))
                    if base is _BiasRouter:
                        keep_wide(router, _BIAS, lambda: None)
                declaring: Any = router
                declaring.balance_weight, declaring.z_loss_weight = balance_weight, z_loss_weight
                known = True
        if weighted and not known:
            raise InputError(
                f"balance_weight={balance_weight}, z_loss_weight={z_loss_weight}: the experts {name!r} have no router "
                "with top_k and a weight, from which pipeloom computes these losses. Set both to 0; the model may "
                "compute a balance loss itself."
            )
    return found


def fused_experts(model: nn.Module) -> list[str]:
    """The names of the modules of fused experts of transformers in a model, taken over or not."""
    return [name for name, module in model.named_modules() if isinstance(module, FusedExperts) or _is_fused(module)]


def make_dispatching(module: nn.Module) -> None:
    """Let a module of fused experts, unless it does already, run its experts through `dispatch`. Its routers stay."""
    if not isinstance(module, FusedExperts):
        usual = hasattr(module, "_apply_gate") and "gate_up_proj" in module._parameters
        usual = usual and not getattr(module, "has_post_expert_norm", False)
        module.__class__ = _joined(FusedExperts if usual else OwnExperts, type(module))


def _is_fused(module: nn.Module) -> bool:
    """Whether a module has stacks of experts, and takes tokens, chosen experts and gates."""
    experts = getattr(module, "num_experts", None)
    stacks = list(module._parameters.items())
    if not isinstance(experts, int) or not {"gate_up_proj", "up_proj"} & module._parameters.keys():
        return False
    if "down_proj" not in module._parameters or any(p is None or p.shape[0] != experts for _, p in stacks):
        return False
    names = list(inspect.signature(type(module).forward, follow_wrapped=True).parameters)
    return len(names) == 4 and all(p is not None and p.dim() == 3 for name, p in stacks if not name.endswith("_bias"))


_made: dict[tuple[Any, Any], Any] = {}


def _joined(base: Any, own: Any) -> Any:
    """A class of the same name whose forward is that of `base`."""
    if (base, own) not in _made:
        names = {"__module__": own.__module__, "__doc__": own.__doc__}
        _made[base, own] = type(own.__name__, (base, own), names)
    return _made[base, own]
