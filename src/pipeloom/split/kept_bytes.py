"""Bytes that autograd keeps for the backward of a module."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from pipeloom.split.stage_module import may_change_input


def kept_bytes(module: nn.Module, value: Any) -> tuple[int, Any]:
    """Bytes that one forward keeps for its backward, without parameters and buffers, and its detached output.

    Each storage counts once.

    Args:
        module: what runs; its buffers may change.
        value: its input.
    """
    held = {each.untyped_storage()._cdata for each in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        value = tree_map(fresh, value)
        if may_change_input(module):
            value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
        output = module(value)
    return sum(storage.nbytes() for storage in kept.values()), tree_map(fresh, output)


def fresh(leaf: Any) -> Any:
    """A tensor, detached, as the start of another graph; other values unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
