"""Values that are in no file: computed buffers, such as rotary tables, and parameters of new heads.

transformers gives them in `_init_weights` of a model: called for the module, then for the modules around it. That runs
here on a copy of these modules alone, with a seed from the module's name: every process that holds a tensor gets the
same values, whatever else it holds.
"""

import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.slicing.context import hashed
from pipeloom.split.planned.module_copies import shallow_copy

_DONE = "_is_hf_initialized"  # transformers' mark on a tensor that keeps its value
# Of threads: torch's generator, and what transformers replaces while it builds a model, belong to all of them.
one_at_a_time = threading.RLock()


def mark_initialized(model: nn.Module) -> None:
    """Mark all tensors of a model, so that only new ones are initialized."""
    for tensor in (*model.parameters(), *model.buffers()):
        setattr(tensor, _DONE, True)


def initial_values(model: nn.Module, path: str, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """The initial values of parameters and buffers of one module, in full, on the CPU.

    Args:
        model: of transformers, on the meta device, marked by `mark_initialized`.
        path: of the module.
        names: of its tensors: all that have no values yet.
        seed: of random values, with the name of the module.

    Raises:
        InputError: the model does not give one of them a value.
    """
    chain = _chain(model, path)
    module = chain[-1]
    made: dict[str, Tensor] = {}
    for name in names:
        table = vars(module)["_parameters" if name in module._parameters else "_buffers"]
        empty = _without_value(table[name])
        made[name] = table[name] = (
            nn.Parameter(empty, empty.is_floating_point()) if name in module._parameters else empty
        )
    _initialize(chain, hashed(seed, path))
    # Of a bool or an unsigned integer, no value shows that nothing was written: it has to stay as another one, too.
    doubtful = {name: value for name, value in made.items() if _may_be_unwritten(value)}
    found = {name: value.clone() for name, value in doubtful.items()}
    for value in doubtful.values():
        value.fill_(_highest(value.dtype))
    if doubtful:
        _initialize(chain, hashed(seed, path))
    unwritten = {name for name, value in doubtful.items() if bool((value == _highest(value.dtype)).all())}
    for name, value in found.items():
        doubtful[name].copy_(value)
    for name, value in made.items():
        if name in unwritten or _has_no_value(value):
            full = f"{path}.{name}".lstrip(".")
            raise InputError(
                f"{full!r} is in no file, and {type(model).__name__} gives it no value. Compute it in `_init_weights`, "
                "where transformers expects it."
            )
    return {name: value.detach() for name, value in made.items()}


def _chain(model: nn.Module, path: str) -> list[nn.Module]:
    """Copies of a model, of the module at `path` and of those in between; they share all other modules."""
    chain = [shallow_copy(model)]
    for name in path.split(".") if path else ():
        child = chain[-1]._modules[name]
        assert child is not None
        chain[-1]._modules[name] = copy = shallow_copy(child)
        chain.append(copy)
    for kind in ("_parameters", "_buffers"):
        vars(chain[-1])[kind] = dict(vars(chain[-1])[kind])
    return chain


def _initialize(chain: list[nn.Module], seed: int) -> None:
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    with one_at_a_time, torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
        torch.manual_seed(seed)
        for index in reversed(range(len(chain))):
            owner: Any = next(each for each in reversed(chain[: index + 1]) if isinstance(each, PreTrainedModel))
            owner._init_weights(chain[index])
            module, own = chain[index], chain[-1]
            if index == len(chain) - 1 and any(map(_has_no_value, (*own._parameters.values(), *own._buffers.values()))):
                reset: Any = getattr(module, "reset_parameters", None)  # of torch's own modules
                if reset is not None:
                    reset()


def _without_value(like: Tensor) -> Tensor:
    """Memory that shows whether it was written: NaN, or the lowest integer."""
    empty = torch.empty(like.shape, dtype=like.dtype)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return empty.fill_(float("nan"))
    return empty.zero_() if like.dtype == torch.bool else empty.fill_(torch.iinfo(like.dtype).min)


def _may_be_unwritten(tensor: Tensor) -> bool:
    """Whether a bool or an unsigned integer is as `_without_value` made it."""
    is_signed = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype.is_signed
    return not is_signed and bool(tensor.numel()) and not bool(tensor.any())


def _highest(dtype: torch.dtype) -> int | bool:
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _has_no_value(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.is_meta or not tensor.numel() or getattr(tensor, _DONE, False):
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all())
    signed = tensor.dtype != torch.bool and torch.iinfo(tensor.dtype).min < 0
    return signed and bool((tensor == torch.iinfo(tensor.dtype).min).all())
