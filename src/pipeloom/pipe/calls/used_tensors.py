"""The parameters and buffers of a forward, which its recomputation uses too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeloom.pipe.calls.buffers import Norm


class UsedTensors:
    """What a module holds when it is made, such as by `torch.func.functional_call`.

    Args:
        module: the layers of a partition.
    """

    def __init__(self, module: nn.Module) -> None:
        self._used: list[tuple[dict[str, Any], str, Tensor | None]] = []
        for part in module.modules():
            for held in (part._parameters, {} if isinstance(part, Norm) else part._buffers):
                self._used += [(held, name, tensor) for name, tensor in held.items()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module holds them again, where others took their places."""
        others = [(held, name, held.get(name)) for held, name, tensor in self._used if held.get(name) is not tensor]
        if others:
            for held, name, tensor in self._used:
                held[name] = tensor
        try:
            yield
        finally:
            for held, name, tensor in others:
                held[name] = tensor
