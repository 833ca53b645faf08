"""Options that have no effect with the others."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy
from pipeloom.train.config.schedule import unused_data_options
from pipeloom.train.config.train_config import TrainConfig, flat

_USERS = {  # optimizers that an option is for
    "beta1": ("adamw", "adam", "lion", "muon"),
    "beta2": ("adamw", "adam", "lion", "muon"),
    "momentum": ("momentum", "muon"),
    "nesterov": ("momentum", "muon"),
    "muon_learning_rate": ("muon",),
}


def check_unused(config: TrainConfig) -> None:
    """Raise for options that have no effect. An option with its default value counts as not given.

    Raises:
        InputError: the first of them.
    """
    values, defaults = (dict(flat(dataclasses.asdict(each))) for each in (config, TrainConfig()))
    for key, where, fix in _unused(config):
        if values[key] != defaults[key]:
            raise InputError(f"{key}={word_of(values[key])}: has no effect {where}. Remove it, or {fix}.")


def _unused(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Per option without effect: its name, the setting that makes it so, and the fix."""
    for name, users in _USERS.items():
        if config.optimizer.name not in users:
            yield f"optimizer.{name}", f"with optimizer.name={config.optimizer.name}", f"use {' or '.join(users)}"
    for name in ("loss_scale", "loss_scale_steps") if config.precision.dtype != "fp16" else ():
        yield f"precision.{name}", f"with precision.dtype={config.precision.dtype}", "use fp16"
    memory = config.memory
    if memory.offload is None:
        yield "memory.offload_states", "without memory.offload", "add --memory.offload cpu or disk:PATH"
    elif memory.offload_activations is None and not (memory.offload_states or memory.offload_parameters):
        fix = "add --memory.offload_activations, or offload states or parameters"
        yield "memory.offload", "where states, parameters and activations stay", fix
    if config.parallel.tensor == 1:
        for name in ("tensor_layout", "tensor_depth", "sequence"):
            yield f"parallel.{name}", "with one tensor-parallel rank", "raise --parallel.tensor"
    if config.parallel.context == 1:
        yield "parallel.context_kind", "with one context-parallel rank", "raise --parallel.context"
    if config.parallel.expert == 1:
        for name in ("expert_axes", "expert_exchange"):
            yield f"parallel.{name}", "with one expert-parallel rank", "raise --parallel.expert"
    if not config.parallel.auto:
        yield from ((name, "without --parallel auto", "add it") for name in ("processes", "replan"))
    if not config.background_saves:
        yield "save_errors", "without background_saves", "add --background_saves true"
    if config.on_spike != "rewind":
        yield "spike_rewinds", f"with on_spike={config.on_spike}", "use rewind"
    if not config.recover:
        yield "max_recoveries", "without --recover", "add it"
    if not (config.recover or config.elastic):
        yield "copy_steps", "without --recover and --elastic", "add one of them"
    if not config.elastic:
        names = ("reroute", "min_ranks", "max_ranks", "regrow_seconds")
        yield from ((name, "without --elastic", "add it") for name in names)
    if not config.save_steps:
        yield "background_saves", "without checkpoints", "raise --save_steps"
    if config.model.pretrained is None:
        fix = "add --model.pretrained"
        yield from ((key, "with a new GPT", fix) for key in ("data.packing", "model.lora"))
    if config.model.lora is None:
        for name in ("lora_alpha", "lora_targets"):
            yield f"model.{name}", "without model.lora", "add --model.lora"
    for name in () if config.parallel.auto else unused_data_options(config):  # plans have replicas
        fix = "raise --parallel.data"
        if DataStrategy(config.parallel.data_strategy).shards_parameters and name != "order":
            fix += ", or add --memory.offload_parameters true"
        yield f"parallel.{name}", "with one data-parallel replica", fix


def word_of(value: Any) -> Any:
    """A value as on a command line."""
    return str(value).lower() if isinstance(value, bool) else value
