"""What training remembers besides the parameters, in a form without pickle: optimizer state by parameter name, and the
states of the random generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.parallel import OffloadedOptimizer

# Names of the types that safetensors can hold.
SAFETENSORS_TYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def is_elementwise(shape: Iterable[int], part: Range) -> bool:
    """Whether an optimizer's state of this shape is a number for each element of a part of a parameter."""
    sizes = tuple(shape)
    return len(sizes) >= 1 and math.prod(sizes) == part.stop - part.start


@dataclass(slots=True)
class OptimizerState:
    """The state of one rank's optimizer.

    `tensors` and `values` are keyed parameter name -> state key; `groups` are the param_groups as
    `{"parameters": [names], "options": {"lr": ..., ...}}`, JSON all through.
    """

    optimizer_class: str
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class RandomState:
    """Generator states of one rank: `tensors` (uint8) of torch, `values` (JSON) of numpy and Python."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> OptimizerState:
    """The state of `optimizer` by fully qualified name; no tensor is copied.

    Works for every optimizer whose state is, for each parameter, a dict of tensors and JSON scalars.
    Raises CheckpointError for a parameter without a name and for other state (LBFGS).
    """
    optimizer = _unwrapped(optimizer)
    found = OptimizerState(type(optimizer).__qualname__)
    for group in optimizer.param_groups:
        options = {key: _option(key, value) for key, value in group.items() if key != "params"}
        parameters = [_name_of(parameter, names) for parameter in group["params"]]
        found.groups.append({"parameters": parameters, "options": options})
        for parameter, name in zip(group["params"], parameters, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.tensors.setdefault(name, {})[key] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    found.values.setdefault(name, {})[key] = value
                else:
                    raise CheckpointError(
                        f"{found.optimizer_class} keeps a {type(value).__name__} as {key!r} of {name}: only tensors "
                        f"and numbers can be saved; use another optimizer"
                    )
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    *,
    optimizer_class: str,
    options_of: Callable[[str], dict[str, Any] | None],
    state_of: Callable[[str, bool], dict[str, Any]],
) -> None:
    """Put saved state into `optimizer`, by name, without changing a bit or a type, one parameter after the other.

    `options_of(name)` gives the options of the group that a parameter was saved in (None: unknown parameter),
    ``state_of(name, True)`` its state, and ``state_of(name, False)`` the same with tensors that have a shape and no
    memory. Each group gets the options its parameters were saved with. Unlike under Optimizer.load_state_dict, moments
    keep their own dtype.

    Raises CheckpointError, before anything is changed, when the two do not fit.
    """
    optimizer = _unwrapped(optimizer)
    if type(optimizer).__qualname__ != optimizer_class:
        raise CheckpointError(
            f"the checkpoint was saved with {optimizer_class}, not {type(optimizer).__qualname__}: "
            f"resume with the optimizer it was saved with"
        )
    options = [_group_options(group["params"], names, options_of) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name_of(parameter, names)
            _check_fits(name, parameter, state_of(name, False), optimizer_class)
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        on_device = bool(saved.get("capturable") or saved.get("fused"))
        for parameter in group["params"]:
            state = state_of(_name_of(parameter, names), True)
            if state:
                optimizer.state[parameter] = {
                    key: _placed(key, value, parameter, on_device) for key, value in state.items()
                }
            else:  # a parameter that never had a gradient has none
                optimizer.state.pop(parameter, None)
        for key, value in saved.items():
            group[key] = _like(group.get(key), value)


def random_state() -> RandomState:
    """The states of this process's global generators: torch (CPU; CUDA's current device if in use), numpy, random."""
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
    """Set the global generators to a saved state; a generator that the state does not mention is left alone."""
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


def _name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    name = names.get(parameter)
    if name is None:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not name: "
            f"build it from the model's parameters"
        )
    return name


def _group_options(
    parameters: Iterable[Tensor], names: Mapping[Tensor, str], options_of: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any]:
    first: tuple[str, dict[str, Any]] | None = None
    for parameter in parameters:
        name = _name_of(parameter, names)
        saved = options_of(name)
        if saved is None:
            raise CheckpointError(f"the checkpoint has no optimizer state of {name}: it is of another model")
        if first is None:
            first = (name, saved)
        elif saved != first[1]:
            differ = next(key for key in saved.keys() | first[1].keys() if saved.get(key) != first[1].get(key))
            raise CheckpointError(
                f"{first[0]} and {name} are in one param group but were saved with different {differ}: "
                f"build the param groups as they were when the checkpoint was saved"
            )
    return first[1] if first else {}


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, of one that keeps its states elsewhere."""
    return optimizer.wrapped if isinstance(optimizer, OffloadedOptimizer) else optimizer


def _check_fits(name: str, parameter: Tensor, state: Mapping[str, Any], optimizer_class: str) -> None:
    """Raises CheckpointError where state is not of a parameter like this one."""
    for key, value in state.items():
        cut_alike = isinstance(value, Tensor) and value.dim() and value.numel() == parameter.numel()
        if cut_alike and value.shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}: "
                f"the checkpoint is of another model"
            )
    if optimizer_class == "Adafactor" and state and ("row_var" in state) != (parameter.dim() > 1):
        raise CheckpointError(
            f"{name} has {parameter.dim()} dimensions here, not as it was saved: Adafactor keeps sums of rows and "
            "columns of a whole matrix and of nothing else; resume in the layout it was saved in"
        )


def _placed(key: str, value: Any, parameter: Tensor, on_device: bool) -> Any:
    # torch counts steps on the CPU unless the whole update runs on the device.
    return value if not isinstance(value, Tensor) or (key == "step" and not on_device) else value.to(parameter.device)


def _option(key: str, value: Any) -> Any:
    """A hyperparameter as JSON. Tensors (a learning rate under `capturable`) become numbers."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_option(key, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"option {key!r} of a param group is a {type(value).__name__}: only numbers, strings and tuples can be saved"
    )


def _like(current: Any, saved: Any) -> Any:
    """`saved` (JSON) in the type that the optimizer uses for this option now."""
    if isinstance(current, Tensor):
        return current.detach().clone().fill_(saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        items = [*current, *[None] * (len(saved) - len(current))]
        return tuple(_like(item, value) for item, value in zip(items, saved, strict=False))
    return saved
