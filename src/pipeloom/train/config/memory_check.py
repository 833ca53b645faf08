"""Refuse sizes that no amount of care fits into this machine, before anything is made of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeloom.common.quantities import bytes_text
from pipeloom.errors import InputError
from pipeloom.parallel.offload.targets import CPU
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.train.config.train_config import TrainConfig

_GPU = Path("/dev/nvidiactl")  # where there is one, memory is asked for elsewhere, and torch says what is missing
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FLOAT_BYTES = 4
_KEPT_WIDTHS = 12  # floats a token and block, in widths, that a forward keeps at least: norms, q, k, v, attention, MLP
_LEAST_VOCABULARY = 256


def check_memory(config: TrainConfig, environment: Mapping[str, str]) -> None:
    """Refuse a model or a batch that takes more than all memory of this machine by the least that it can take.

    Raises:
        InputError: the sizes, what they take, and what there is.
    """
    if _GPU.exists():
        return
    model, batch = least_bytes(config)
    processes = config.num_ranks * config.num_copies
    local = environment.get("LOCAL_WORLD_SIZE", "")
    share = min(1.0, int(local) / processes) if local.isdecimal() else 1.0
    limit = _memory_bytes()
    if (model + batch) * share > limit:
        what, fix = (
            (f"model.layers {config.model.layers} of model.width {config.model.width}", "lower one of them")
            if model > batch
            else (
                f"batch.size {config.batch.size} in {config.num_microbatches} micro-batches of "
                f"model.sequence_length {config.model.sequence_length}",
                "lower batch.size, or raise batch.microbatches",
            )
        )
        raise InputError(
            f"{what}: training takes at least {bytes_text(model * share)} for the model and "
            f"{bytes_text(batch * share)} for a batch, this machine has {bytes_text(limit)}; {fix}"
        )


def likely_device() -> str:
    """The kind of device that a run here computes with, without asking torch."""
    return "cuda" if _GPU.exists() else "cpu"


def least_bytes(config: TrainConfig) -> tuple[int, int]:
    """What all processes hold at least: weights, gradients, moments; a batch, and one micro-batch's activations."""
    model, batch = config.model, config.batch
    parameters = 12 * model.layers * model.width**2 + (2 - model.tie_embeddings) * _LEAST_VOCABULARY * model.width
    tokens = batch.size // config.num_microbatches * model.sequence_length  # a micro-batch of every copy
    recomputes = config.memory.recompute != "none" or config.memory.cap is not None
    kept = model.layers * (1 if recomputes else _KEPT_WIDTHS)
    activations = 4 * tokens * (kept * model.width + _LEAST_VOCABULARY)
    return _parameter_bytes(config) * parameters, activations + 16 * batch.size * model.sequence_length


def _parameter_bytes(config: TrainConfig) -> int:
    """What all copies together hold of one parameter."""
    copies, strategy, precision = config.num_copies, config.parallel.data_strategy, config.precision
    computed = _FLOAT_BYTES if precision.dtype == "fp32" else _FLOAT_BYTES // 2
    summed = computed if precision.gradients == "same" else _FLOAT_BYTES
    away = config.memory.offload not in (None, CPU) and config.memory.offload_states
    gone = config.memory.offload not in (None, CPU) and config.memory.offload_parameters
    moments = 0 if away else int(_FLOAT_BYTES * OPTIMIZERS[config.optimizer.name])
    masters = 0 if precision.dtype == "fp32" or gone else _FLOAT_BYTES
    sharded = 0 if gone else 1
    return (
        computed * (sharded if strategy == "zero3" else copies)
        + summed * (1 if strategy in ("zero2", "zero3") else copies)
        + (moments + masters) * (copies if strategy == "ddp" else 1)
    )


def _memory_bytes() -> int:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return installed
