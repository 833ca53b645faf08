"""Optimizer state by parameter name and the states of random generators, without pickle."""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, one_line
from pipeloom.parallel import OffloadedOptimizer


def is_elementwise(shape: Iterable[int], part: Range) -> bool:
    """Whether optimizer state of this shape has one number per element of a shard."""
    sizes = tuple(shape)
    return len(sizes) >= 1 and math.prod(sizes) == part.stop - part.start


def check_elements(name: str, tensor: Tensor, part: Range) -> None:
    """Raises CheckpointError if a tensor has another number of elements than its range."""
    if tensor.numel() != part.stop - part.start:
        raise CheckpointError(
            f"{name} has {tensor.numel()} elements, but its range {part.start} to {part.stop} has "
            f"{part.stop - part.start}. Pass tensors and ranges of the same layout."
        )


@dataclass(slots=True)
class OptimizerState:
    """The optimizer state of one rank.

    Attributes:
        optimizer_class: the name of the optimizer class.
        tensors: parameter name -> state key -> tensor.
        values: parameter name -> state key -> JSON value.
        groups: the param_groups in JSON, `{"parameters": [names], "options": {"lr": ..., ...}}`.
    """

    optimizer_class: str
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class RandomState:
    """Generator states of one rank: `tensors` (uint8) for torch, `values` (JSON) for numpy and Python; and their source
    for error messages."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    source: str = "the checkpoint"


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> OptimizerState:
    """The state of `optimizer` by fully qualified parameter name, without copies.

    Supports all optimizers with a dict of tensors and JSON scalars per parameter.

    Raises:
        CheckpointError: a parameter has no name, or the optimizer has other state (LBFGS).
    """
    optimizer = unwrapped(optimizer)
    found = OptimizerState(type(optimizer).__qualname__)
    for group in optimizer.param_groups:
        options = {key: _option(key, value) for key, value in group.items() if key != "params"}
        parameters = [name_of(parameter, names) for parameter in group["params"]]
        found.groups.append({"parameters": parameters, "options": options})
        for parameter, name in zip(group["params"], parameters, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.tensors.setdefault(name, {})[key] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    found.values.setdefault(name, {})[key] = value
                else:
                    raise CheckpointError(
                        f"{found.optimizer_class} has state {key!r} of type {type(value).__name__} for {name}: only "
                        "tensors, numbers and strings can be saved. Use another optimizer."
                    )
    return found


def random_state() -> RandomState:
    """The states of the global generators: torch (CPU, and the current CUDA device if used), numpy, random."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    values = {
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": list(random.getstate()),
    }
    return RandomState(tensors, values)


def restore_random_state(state: RandomState) -> None:
    """Restore the global generators. A generator without saved state is not changed.

    Raises:
        CheckpointError: the state is none of a generator.
    """
    try:
        _restore(state)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{state.source} has no valid states of random generators ({one_line(error)}). Use another checkpoint."
        ) from error


def _restore(state: RandomState) -> None:
    if (torch_state := state.tensors.get("torch")) is not None:
        torch.set_rng_state(torch_state)
    if (cuda_state := state.tensors.get("cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda_state)
    if numpy_state := state.values.get("numpy"):
        kind, keys, *rest = numpy_state
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if python_state := state.values.get("python"):
        version, words, gauss = python_state
        random.setstate((version, tuple(words), gauss))


def name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    """The name of a parameter of an optimizer. Raises CheckpointError if it has none."""
    name = names.get(parameter)
    if name is None:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model. Create the "
            "optimizer from the parameters of the model."
        )
    return name


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside an `OffloadedOptimizer`, or the optimizer itself."""
    return optimizer.wrapped if isinstance(optimizer, OffloadedOptimizer) else optimizer


def _option(key: str, value: Any) -> Any:
    """A hyperparameter as JSON. Tensors (a learning rate with `capturable`) become numbers."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_option(key, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"option {key!r} of a param group is a {type(value).__name__}: must be a number, string or tuple."
    )


def check_state(name: str, parameter: Tensor, state: Mapping[str, Any], optimizer_class: str) -> None:
    """Raises CheckpointError if the state does not match the shape of the parameter."""
    for key, value in state.items():
        elementwise = isinstance(value, Tensor) and value.dim() and value.numel() == parameter.numel()
        if elementwise and value.shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}. The "
                "checkpoint was saved from a different model."
            )
    if optimizer_class == "Adafactor" and state and ("row_var" in state) != (parameter.dim() > 1):
        raise CheckpointError(
            f"{name} has {parameter.dim()} dimensions, which does not match the saved Adafactor state: row and column "
            "sums exist only for full matrices. Resume with the saved layout."
        )


def like(current: Any, saved: Any) -> Any:
    """`saved` (JSON) converted to the type of the current value of the option."""
    if isinstance(current, Tensor):
        return current.detach().clone().fill_(saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        items = [*current, *[None] * (len(saved) - len(current))]
        return tuple(like(item, value) for item, value in zip(items, saved, strict=False))
    return saved
