"""`Snapshot`: copies of everything that an optimizer changes, to undo an update bitwise."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Copies of some parameters, their gradients and optimizer states. The memory is reused by the next snapshot.

    Copies restore every optimizer exactly. The inverse of an update would not: it divides what was multiplied.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._states: dict[nn.Parameter, dict[Any, Any]] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def take(self, parameters: Sequence[nn.Parameter], state: Mapping[Tensor, dict[Any, Any]]) -> None:
        """Copy the current values.

        Args:
            parameters: those that the update may change.
            state: of the optimizer; a parameter without an entry has no state yet.
        """
        changing = [p for p in parameters if p.grad is not None]  # optimizers skip the others
        self._gradients = {p: p.grad for p in changing if p.grad is not None}
        self._states = {
            p: {key: value if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state[p].items()}
            for p in changing
            if p in state
        }
        states = [value for entry in self._states.values() for value in entry.values() if isinstance(value, Tensor)]
        self._tensors = [*(p.detach() for p in changing), *self._gradients.values(), *states]
        self._fill_copies()

    def _fill_copies(self) -> None:
        def kind(tensor: Tensor) -> tuple[Any, ...]:
            return tensor.shape, tensor.dtype, tensor.device

        if list(map(kind, self._copies)) == list(map(kind, self._tensors)):
            _copy(self._copies, self._tensors)
        else:
            self._copies = [tensor.clone() for tensor in self._tensors]

    def restore(self, state: dict[Tensor, dict[Any, Any]]) -> None:
        """Restore the copied values."""
        with torch.no_grad():
            _copy(self._tensors, self._copies)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
            if parameter in self._states:
                state[parameter] = self._states[parameter]
            else:
                state.pop(parameter, None)

    def release(self) -> None:
        """Drop the references; keep the memory for the next snapshot."""
        self._tensors, self._states, self._gradients = [], {}, {}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch raises on empty lists; a rank may have nothing to train
        torch._foreach_copy_(targets, sources)
