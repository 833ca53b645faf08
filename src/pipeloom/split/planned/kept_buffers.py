"""`KeptBuffers`: buffers as they were before a forward went on with zeros."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class KeptBuffers:
    """The values of buffers, to be restored where they change.

    Args:
        homes: of each module its dict of buffers.
    """

    def __init__(self, homes: Iterable[dict[str, Any]]) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Tensor, Tensor, int]] = []
        for home in homes:
            self._kept.append((home, dict(home)))
            tensors = (tensor for tensor in home.values() if tensor is not None and not tensor.is_meta)
            self._values += [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]

    def restore(self) -> None:
        """Give the modules their buffers back, with the values that they had."""
        for home, kept in self._kept:
            home.update(kept)
        with torch.no_grad():
            for tensor, value, version in self._values:
                if tensor._version != version:
                    tensor.copy_(value)
