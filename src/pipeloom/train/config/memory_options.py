"""What ``memory`` in a configuration makes of a run: recomputation, and what is kept elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.offload.targets import CPU, OffloadActivations, OffloadTarget
from pipeloom.parallel.options import DataParallel, axis_of
from pipeloom.passes import lower
from pipeloom.train.config.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeloom.training import Pipeline

NUM_NUMBERS = 4  # of `offload_numbers`


def check_less_memory(config: TrainConfig, schedule: Schedule) -> None:
    """Raises InputError where ``memory`` means nothing, or does not go with the rest."""
    memory = config.memory
    recompute_of_stages(memory.recompute, schedule.num_stages)
    if memory.offload is None:
        if memory.offload_activations is not None:
            raise InputError(
                f"memory.offload_activations is {memory.offload_activations} without memory.offload: activations need "
                "a place to go; give --memory.offload cpu or disk:PATH"
            )
        if memory.offload_parameters:
            raise InputError(
                "memory.offload_parameters without memory.offload: parameters need a place to go; give "
                "--memory.offload cpu or disk:PATH"
            )
        return
    OffloadTarget.parse(memory.offload)
    if memory.offload_parameters:
        axis_of(replace(config.data_parallel, offload=memory.offload), config.number_format, config.num_copies)
    if memory.offload_states and not config.optimizer.barrier:
        raise InputError(
            "memory.offload with optimizer.barrier false: an update that may be taken back needs its states at hand; "
            "leave one of them out, or give --memory.offload_states false"
        )
    if memory.offload_activations is not None:
        if memory.offload_activations < 0:
            raise InputError(
                f"memory.offload_activations is {memory.offload_activations}: it is how many a rank keeps, 0 for as "
                "few as moves can keep; raise it"
            )
        _activations(config).insert(lower(schedule))


def shared(config: TrainConfig, device: str) -> DataParallel | None:
    """What the pipeline is told of parameters on a kind of `device`, and where they are between updates."""
    away = config.memory.offload_parameters and moves(config, device)
    return config.shared and replace(config.shared, offload=config.memory.offload if away else None)


def activations_away(config: TrainConfig, device: str) -> OffloadActivations | None:
    """What the pipeline is told of activations that move off a kind of `device`; None where none do."""
    if not moves(config, device) or config.memory.offload_activations is None:
        return None
    return _activations(config)


def _activations(config: TrainConfig) -> OffloadActivations:
    assert config.memory.offload is not None
    return OffloadActivations(config.memory.offload, config.memory.offload_activations or None)


def states_away(optimizer: torch.optim.Optimizer, config: TrainConfig, device: str) -> torch.optim.Optimizer:
    """The optimizer that the run steps: `optimizer`, or what streams its states and parameters.

    Raises:
        InputError: there is no room for them.
    """
    states, parameters = config.memory.offload_states, config.memory.offload_parameters
    if not (moves(config, device) and (states or parameters)):
        return optimizer
    from pipeloom.parallel.offload.offloaded_optimizer import OffloadedOptimizer

    return OffloadedOptimizer(optimizer, config.memory.offload if states else None)


def offload_notices(config: TrainConfig, device: str) -> list[str]:
    """That nothing moves, where that is so."""
    if config.memory.offload is None or moves(config, device):
        return []
    return ["memory.offload cpu: this run computes in the CPU's memory, nothing moves; disk:PATH would"]


def moves(config: TrainConfig, device: str) -> bool:
    """Whether there is other memory than that of a kind of `device` ("cpu", "cuda") for things to go to."""
    return config.memory.offload is not None and not OffloadTarget.parse(config.memory.offload).kind == CPU == device


def offload_numbers(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Tensor:
    """Bytes of states and of parameters elsewhere, bytes moved and seconds waited so far, of this process.

    Shape [4], float64.
    """
    import torch

    held: Any = optimizer
    moved, waited = pipe.memory.offload_traffic
    states = getattr(held, "offloaded_bytes", 0)
    moved += getattr(held, "moved_bytes", 0)
    waited += getattr(held, "wait_seconds", 0.0)
    return torch.tensor([states, pipe.memory.offloaded_parameters.num_bytes, moved, waited], dtype=torch.float64)


def offload_metrics(config: TrainConfig, numbers: Tensor) -> dict[str, Any]:
    """What a row of metrics has of the sum of `offload_numbers`; nothing where nothing is elsewhere."""
    if config.memory.offload is None:
        return {}
    states, parameters, moved, waited = numbers.tolist()
    return {
        "offloaded_state_bytes": int(states),
        "offloaded_parameter_bytes": int(parameters),
        "offload_moved_bytes": int(moved),
        "offload_wait_seconds": waited,
    }
