"""Forwards that run before it is known whether their parameters stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Speculation(Protocol):
    """Who knows whether the parameters stand; asked by every rank of a process, maybe from a thread of its own."""

    @property
    def owns_random_state(self) -> bool:
        """Whether nobody but the rank that asks draws from this process's random generators."""

    def ready(self, rank: int) -> bool:
        """Whether `validate` would return at once."""

    def validate(self, rank: int) -> bool:
        """Wait until it is known, put right what is wrong; True where what was computed meanwhile counts."""


class CancelledError(Exception):
    """Another rank found the parameters wrong and computes no more with them."""


@dataclass
class ForwardState:
    """What forwards change beside the graph: buffers, such as running means, and random generators."""

    _buffers: list[tuple[nn.Module, str, Tensor, Tensor]]  # owner, name, the buffer and a copy of it
    _random: Tensor | None
    _device_random: Tensor | None

    @classmethod
    def take(cls, modules: Iterable[nn.Module], *, with_random_state: bool) -> ForwardState:
        """Note everything as it is now."""
        buffers = [
            (module, name, buffer, buffer.clone())
            for stage in modules
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        on_device = with_random_state and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            buffers,
            torch.get_rng_state() if with_random_state else None,
            torch.cuda.get_rng_state() if on_device else None,
        )

    def restore(self) -> None:
        """Make everything as it was."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                module._buffers[name] = buffer.copy_(values)
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)
