"""Parameter initialization by name: each rank initializes its stages, and the values do not depend on the split."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError

# Prefixes that torch.compile and activation checkpointing add to names; they are ignored.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_STD = 0.02  # GPT-2's


@torch.no_grad()
def init_parameters(module: nn.Module, *, seed: int) -> None:
    """Initialize every parameter with a generator seeded with (`seed`, canonical name).

    Matrices are normal with standard deviation 0.02, or ``init_std[child]`` of the enclosing module; biases are 0,
    other vectors (the gains of norms) 1. Values are drawn on the CPU in float32, so they do not depend on
    split, device and dtype. Names of tied parameters are looked up in ``module.canonical_names``.
    """
    canonical: dict[str, str] = getattr(module, "canonical_names", {})
    parents = dict(module.named_modules())
    done: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        path, _, last = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        stds: dict[str, float] = getattr(parents.get(parent), "init_std", {})
        _fill(parameter, last, stds.get(child, _STD), _generator(seed, canonical.get(name, name)))


def _generator(seed: int, name: str) -> torch.Generator:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _fill(parameter: Tensor, name: str, std: float, generator: torch.Generator) -> None:
    if parameter.ndim < 2:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))


@torch.no_grad()
def materialize(module: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Move a stage that was built on the meta device to `device` and initialize it. Tied parameters stay tied.

    Buffers on the meta device are recomputed by ``reset_buffers()`` of their module (or ``reset_running_stats()`` of
    BatchNorm); other buffers are moved with their values.

    Raises:
        InputError: the module of a buffer on the meta device has no such method.
    """
    new: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in new:
                    empty = torch.empty_like(parameter, device=device)
                    new[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                part._parameters[name] = new[id(parameter)]
        buffers = {name: buffer for name, buffer in part._buffers.items() if buffer is not None}
        lost = [name for name, buffer in buffers.items() if buffer.is_meta]
        for name, buffer in buffers.items():
            part._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        if lost:
            reset: Callable[[], None] | None = getattr(part, "reset_buffers", None)
            reset = reset or getattr(part, "reset_running_stats", None)
            if reset is None:
                raise InputError(
                    f"buffer {f'{path}.{lost[0]}'.lstrip('.')!r} is on the meta device and has no values. "
                    f"Give {type(part).__name__} a method reset_buffers() that computes them."
                )
            reset()
    init_parameters(module, seed=seed)
