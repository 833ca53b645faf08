"""Bytes that autograd keeps for the backward of a module."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from pipeloom.split.stage_module import may_change_input


class KeptStorages(saved_tensors_hooks):
    """A context that finds what autograd keeps of the operations inside. Each storage counts once.

    Args:
        held: tensors that do not count, such as parameters.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        self._held = {each.untyped_storage()._cdata for each in held}
        self._kept: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._kept[storage._cdata] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(storage.nbytes() for storage in self._kept.values())


def kept_bytes(module: nn.Module, value: Any) -> tuple[int, Any]:
    """Bytes that one forward keeps for its backward, without parameters and buffers, and its detached output.

    Each storage counts once.

    Args:
        module: what runs; its buffers may change.
        value: its input.
    """
    kept = KeptStorages((*module.parameters(), *module.buffers()))
    with torch.enable_grad(), kept:
        value = tree_map(fresh, value)
        if may_change_input(module):
            value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
        output = module(value)
    return kept.nbytes, tree_map(fresh, output)


def fresh(leaf: Any) -> Any:
    """A tensor, detached, as the start of another graph; other values unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
