"""The optimizer over this process's parameters, and the learning rate of every step."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeloom.engine.stores.blocks import Blocks
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.training import Lion, Muon

HIDDEN = "blocks."  # prefix of the names of a GPT's blocks; embedding, last norm and head have none


def learning_rate(step: int, num_steps: int, config: OptimizerConfig, largest: float | None = None) -> float:
    """The learning rate of step `step` (0 is the first) of `num_steps`.

    Linear warm-up to `largest`, by default ``learning_rate``, over ``warmup_steps``, then half a cosine
    (arXiv:1608.03983) down to ``min_learning_rate_fraction`` of it at the last step.
    """
    largest = config.learning_rate if largest is None else largest
    if step < config.warmup_steps:
        return largest * (step + 1) / config.warmup_steps
    decay_steps = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    fraction = config.min_learning_rate_fraction
    return largest * (fraction + (1 - fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some groups of parameters, AdamW for the others, as one optimizer.

    Muon (https://kellerjordan.github.io/posts/muon) makes the momentum of a matrix nearly orthogonal; it is meant for
    matrices between hidden layers. AdamW (arXiv:1711.05101) updates everything else.

    Args:
        groups: with ``algorithm`` "muon" or "adamw" and its options. Parameters of muon are matrices, or stacks.
        blocks: how the processes inside a stage share them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], blocks: Blocks) -> None:
        groups = list(groups)
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "muon": partial(Muon, pipeline=blocks),
            "adamw": torch.optim.AdamW,
        }
        self._inner = {
            name: make(mine)
            for name, make in kinds.items()
            if (mine := [group for group in groups if group["algorithm"] == name])
        }
        super().__init__([group for inner in self._inner.values() for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; groups and state are this optimizer's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, inner in self._inner.items():
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.state = self.state
            inner.step()
        return loss


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    blocks: Blocks | None = None,
    hidden_prefixes: tuple[str, ...] = (HIDDEN,),
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that require gradients; matrices decay, vectors (gains of norms, biases) do not.

    All but Muon and Adafactor are elementwise, so their updates do not depend on how parameters are sharded.

    Args:
        parameters: this process's, by name in the uncut model.
        config: which, and its options.
        shapes: full shapes of sharded parameters.
        blocks: how the processes inside a stage share parameters; None: each has all of them.
        hidden_prefixes: of the names of parameters between embedding and head, whose matrices Muon updates.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    hidden: list[nn.Parameter] = []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        shape = (shapes or {}).get(name, parameter.shape)
        if config.name == "muon" and len(shape) in (2, 3) and name.startswith(hidden_prefixes):
            if parameter.numel():  # empty shards: the full matrix is on another replica
                hidden.append(parameter)
        elif parameter.numel() or config.name != "adafactor":  # it has no row sums of nothing
            (matrices if len(shape) >= 2 else vectors).append(parameter)
    decaying = {"params": matrices, "weight_decay": config.weight_decay}
    groups: list[dict[str, Any]] = [decaying, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, fused=True)
        case "momentum":
            nesterov = config.nesterov and config.momentum > 0
            return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=nesterov, fused=True)
        case "lion":
            return Lion(groups, lr=rate, betas=betas)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate)
        case "muon":
            adamw = {"algorithm": "adamw", "lr": rate, "betas": betas, "fused": True}
            muon = {
                "algorithm": "muon",
                "params": hidden,
                "lr": config.muon_learning_rate,
                "weight_decay": config.weight_decay,
                "momentum": config.momentum,
                "nesterov": config.nesterov,
            }
            return MuonWithAdamW(
                [*([muon] if hidden else []), *(group | adamw for group in groups)], blocks or Blocks()
            )


def learning_rates(optimizer: torch.optim.Optimizer, step: int, num_steps: int, config: OptimizerConfig) -> list[float]:
    """The learning rate of every group of parameters, as `learning_rate`."""
    return [
        learning_rate(step, num_steps, config, config.muon_learning_rate if group.get("algorithm") == "muon" else None)
        for group in optimizer.param_groups
    ]


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
