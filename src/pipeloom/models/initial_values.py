"""Initial values that depend on a parameter's name and on nothing else, so that every rank makes its own."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError

# What torch.compile and activation checkpointing put into names; it must not change the values.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_STD = 0.02  # GPT-2's


@torch.no_grad()
def init_parameters(module: nn.Module, *, seed: int) -> None:
    """Give every parameter its initial value, drawn by a generator seeded with (`seed`, its canonical name).

    Matrices are normal with standard deviation 0.02, or what the module around them says in ``init_std[child]``;
    biases are 0, other vectors (the gains of norms) 1. Values are drawn on the CPU in float32, so they are the same
    for every cut, device and floating type. A stage's tied parameters follow ``module.canonical_names``.
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
    """Move a stage that was built on the meta device to `device` and initialise it; what is tied stays tied.

    Buffers on the meta device are rebuilt by their module's ``reset_buffers()`` (or BatchNorm's
    ``reset_running_stats()``); all other buffers are moved with their values.

    Raises:
        InputError: a buffer on the meta device that nothing can rebuild.
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
                    f"buffer {f'{path}.{lost[0]}'.lstrip('.')!r} is on the meta device and has no values: "
                    f"give {type(part).__name__} a method reset_buffers() that fills it"
                )
            reset()
    init_parameters(module, seed=seed)
