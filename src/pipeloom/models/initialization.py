"""Initial values of parameters, by their names: the same on every split and device."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.slicing.context import hashed

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and checkpointing, ignored
STD = 0.02  # GPT-2's


@torch.no_grad()
def init_parameters(module: nn.Module, *, seed: int) -> None:
    """Initialize every parameter with a generator seeded with (`seed`, canonical name).

    Matrices are normal with standard deviation 0.02, or ``init_std[parameter]`` of their module, or ``init_std[child]``
    of the module around it. So are parameters of three dimensions, such as those of experts. Biases are 0, other
    vectors (the gains of norms) 1. Values are drawn on the CPU in float32, so they do not depend on split, device and
    dtype. Of a parameter that is cut inside its stage (`pipeloom.parallel.placed`), all values are drawn, and this
    process keeps its block. Names of tied parameters are looked up in ``module.canonical_names``.
    """
    canonical: dict[str, str] = getattr(module, "canonical_names", {})
    parents = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        around: dict[str, float] = getattr(parents.get(parent), "init_std", {})
        stds: dict[str, float] = getattr(parents.get(path), "init_std", {})
        block = getattr(parameter, "placed_block", None)
        shape = parameter.shape if block is None else block.full_shape
        if len(shape) < 2:
            full = torch.full(shape, 0.0 if last.endswith("bias") else 1.0)
        else:
            key = canonical.get(name, name)
            for wrapper in _WRAPPERS:
                key = key.replace(wrapper, "")
            draw, std = torch.Generator().manual_seed(hashed(seed, key)), stds.get(last, around.get(child, STD))
            full = torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=draw)
        parameter.copy_(full if block is None else block.cut(full))


@torch.no_grad()
def materialize(module: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Move a stage that was built on the meta device to `device` and initialize it. Tied parameters stay tied.

    Buffers on the meta device are recomputed by ``reset_buffers()`` of their module (or ``reset_running_stats()`` of
    BatchNorm); other buffers are moved with their values. In models of transformers, and stages that run their forward,
    `_init_weights` of the model computes them. A module that is made of its `config` alone, such as a rotary embedding
    of transformers, is made again for its buffers.

    Raises:
        InputError: the module of a buffer on the meta device has no such method.
    """
    new: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in new:
                    made = nn.Parameter(_empty_like(parameter, device), parameter.requires_grad)
                    vars(made).update(vars(parameter))
                    new[id(parameter)] = made
                part._parameters[name] = new[id(parameter)]
        lost = [name for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _empty_like(buffer, device) if buffer.is_meta else buffer.to(device)
        if lost:
            reset: Any = getattr(part, "reset_buffers", None) or getattr(part, "reset_running_stats", None)
            if reset is None and _initialized_by_model(module, path, lost):
                continue
            if reset is None and _takes_config_alone(part):
                with torch.device(device):
                    fresh = type(part)(part.config)
                part._buffers.update({name: fresh._buffers[name] for name in lost})
                continue
            if reset is None:
                raise InputError(
                    f"buffer {f'{path}.{lost[0]}'.lstrip('.')!r} is on the meta device and has no values. "
                    f"Give {type(part).__name__} a method reset_buffers() that computes them."
                )
            reset()
    init_parameters(module, seed=seed)


def _empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """As `torch.empty_like`, which loads sympy for a tensor on the meta device."""
    if tensor.is_meta and tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def _initialized_by_model(module: nn.Module, path: str, lost: list[str]) -> bool:
    """Whether the model of transformers around a part, or that a stage was cut from, computed its lost buffers."""
    names = path.split(".")
    around = [module.get_submodule(".".join(names[:end])) for end in range(len(names), 0, -1)]
    owners = [*around, module, getattr(module, "whole_model", None)]
    owner: Any = next((each for each in owners if hasattr(each, "_init_weights")), None)
    part = module.get_submodule(path)
    buffers = [buffer for name in lost if (buffer := part._buffers[name]) is not None]
    if owner is None or any(buffer.dtype == torch.bool for buffer in buffers):
        return False
    empty = [torch.nan if each.is_floating_point() else torch.iinfo(each.dtype).min for each in buffers]
    for buffer, value in zip(buffers, empty, strict=True):
        buffer.fill_(value)
    with torch.random.fork_rng(devices=[]):
        owner._init_weights(part)
    return all(
        not buffer.numel() or not bool((buffer.isnan() if value != value else buffer == value).all())
        for buffer, value in zip(buffers, empty, strict=True)
    )


def _takes_config_alone(module: nn.Module) -> bool:
    """Whether a module without parameters can be made again from its attribute `config`."""
    if getattr(module, "config", None) is None or next(module.parameters(), None) is not None:
        return False
    first, *others = inspect.signature(type(module)).parameters.values()
    return first.name == "config" and all(each.default is not each.empty for each in others)
