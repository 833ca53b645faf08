"""AdamW over this process's parameters, its step, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from pipeloom.runtime import BarrierStep, OptimizerStep, Pipeline, PostValidatedStep
from pipeloom.train.config import OptimizerConfig
from pipeloom.train.group import Group


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step` (0 is the first) of `num_steps`.

    Linear warm-up to ``learning_rate`` over ``warmup_steps``, then half a cosine (arXiv:1608.03983) down to
    ``min_learning_rate_fraction`` of it at the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    fraction = config.min_learning_rate_fraction
    return config.learning_rate * (fraction + (1 - fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); matrices decay, vectors (gains of norms, biases) do not.

    The update is elementwise, so it does not depend on how the parameters are spread over ranks.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def make_stepper(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, config: OptimizerConfig, group: Group
) -> OptimizerStep:
    """Steps of `pipeline` with or without a barrier, as `config` says."""
    max_norm = config.clip_norm or math.inf
    if config.barrier:
        return BarrierStep(pipeline, optimizer, max_norm=max_norm, sum_over_processes=group.sum)
    return PostValidatedStep(pipeline, optimizer, max_norm=max_norm)


def apply_options(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Give the options of `config` to an optimizer whose state, options included, came from a checkpoint."""
    for group in optimizer.param_groups:
        group["betas"] = (config.beta1, config.beta2)
        group["weight_decay"] = config.weight_decay if group["params"][0].ndim >= 2 else 0.0


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
