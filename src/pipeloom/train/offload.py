"""Offload in a run: the options of the pipeline and the optimizer, and the offload metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.parallel import OffloadedOptimizer
from pipeloom.parallel.options import DataParallel
from pipeloom.train.config.memory import offloads
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.training import Pipeline

NUM_NUMBERS = 4  # of `offload_numbers`


def data_parallel(config: TrainConfig, device: str) -> DataParallel | None:
    """The data-parallel options, with the offload target of main parameters."""
    target = config.memory.offload if config.memory.offload_parameters and offloads(config, device) else None
    return config.shared and replace(config.shared, offload=target)


def with_offload(optimizer: torch.optim.Optimizer, config: TrainConfig, device: str) -> torch.optim.Optimizer:
    """`optimizer`, wrapped in an `OffloadedOptimizer` where the run offloads states or parameters.

    Raises:
        InputError: the offload target is full.
    """
    states, parameters = config.memory.offload_states, config.memory.offload_parameters
    if not (offloads(config, device) and (states or parameters)):
        return optimizer
    return OffloadedOptimizer(optimizer, config.memory.offload if states else None)


def offload_notices(config: TrainConfig, device: str) -> list[str]:
    """A notice where nothing is offloaded although an offload target is set."""
    if config.memory.offload is None or offloads(config, device):
        return []
    return ["memory.offload=cpu: has no effect, because this run computes on the CPU. Use disk:PATH."]


def offload_numbers(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Tensor:
    """Of this process: offloaded bytes of states and of parameters, bytes moved so far, seconds waited so far.

    Shape [4], float64.
    """
    held: Any = optimizer
    moved, waited = pipe.memory.offload_traffic
    states = getattr(held, "offloaded_bytes", 0)
    moved += getattr(held, "moved_bytes", 0)
    waited += getattr(held, "wait_seconds", 0.0)
    return torch.tensor([states, pipe.memory.offloaded_parameters.num_bytes, moved, waited], dtype=torch.float64)


def offload_metrics(config: TrainConfig, numbers: Tensor) -> dict[str, Any]:
    """The sum of `offload_numbers` over processes as keys of a row of metrics; none without an offload target."""
    if config.memory.offload is None:
        return {}
    states, parameters, moved, waited = numbers.tolist()
    return {
        "offloaded_state_bytes": int(states),
        "offloaded_parameter_bytes": int(parameters),
        "offload_moved_bytes": int(moved),
        "offload_wait_seconds": waited,
    }
