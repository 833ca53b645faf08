"""Options that mean nothing beside the others: who gives one expects something of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pipeloom.errors import InputError
from pipeloom.train.config.data_parallel import idle_options
from pipeloom.train.config.train_config import TrainConfig

_BETAS, _SUMS = ("adamw", "adam", "muon"), ("momentum", "muon")
_OPTIMIZERS = {"beta1": _BETAS, "beta2": _BETAS, "momentum": _SUMS, "nesterov": _SUMS, "muon_learning_rate": ("muon",)}


def check_unused(config: TrainConfig) -> None:
    """Refuse what was given and would be left out of account; an option with its default was not given.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    for key, value, where, needed in _unused(config):
        raise InputError(f"{key} {value} {where}: it would change nothing; leave it out, or {needed}")


def _unused(config: TrainConfig) -> Iterator[tuple[str, Any, str, str]]:
    """(option, its value, beside what it means nothing, what it is for) of each."""
    for name, users in _OPTIMIZERS.items():
        if config.optimizer.name not in users and _given(config.optimizer, name):
            value, beside = getattr(config.optimizer, name), f"with optimizer.name {config.optimizer.name}"
            yield f"optimizer.{name}", value, beside, f"take {' or '.join(users)}"
    for name in ("loss_scale", "loss_scale_steps"):
        if config.precision.dtype != "fp16" and _given(config.precision, name):
            value, beside = getattr(config.precision, name), f"with precision.dtype {config.precision.dtype}"
            yield f"precision.{name}", value, beside, "take fp16"
    memory, parallel = config.memory, config.parallel
    if not memory.offload_states and memory.offload is None:
        yield "memory.offload_states", "false", "without memory.offload", "give --memory.offload cpu or disk:PATH"
    elif memory.offload_activations is None and not (memory.offload_states or memory.offload_parameters):
        needed = "give --memory.offload_activations, or let states or parameters go there"
        yield "memory.offload", memory.offload, "with memory.offload_states false, and activations stay", needed
    for name in idle_options(config):
        if _given(parallel, name):
            needed = "give --parallel.data for more"
            if parallel.data_strategy == "zero3" and name != "order":
                needed += ", or --memory.offload_parameters true"
            yield f"parallel.{name}", getattr(parallel, name), "with one copy, which shares nothing", needed


def _given(part: Any, name: str) -> bool:
    default = next(entry.default for entry in dataclasses.fields(part) if entry.name == name)
    return bool(getattr(part, name) != default)
