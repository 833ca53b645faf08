"""Bytes of parameters and gradients, counted by their storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn


class HeldBytes(NamedTuple):
    """Bytes held at one moment.

    Attributes:
        parameters: of modules; of sharded ones those that are gathered.
        masters: of main parameters with their own memory: master parameters, shards.
        gradients: of modules and of main parameters, and of gradients in reduction.
    """

    parameters: int
    masters: int
    gradients: int

    @classmethod
    def of(cls, modules: Iterable[nn.Module], main: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> HeldBytes:
        """Counted storage by storage, each once."""
        seen: set[int] = set()
        own = _new_bytes((p for module in modules for p in module.parameters()), seen)
        return cls(own, _new_bytes(main, seen), _new_bytes(gradients, seen))


class PeakBytes(NamedTuple):
    """Peak bytes of the last run.

    Attributes:
        gathered: of gathered parameters that are freed again (zero3).
        gradients: as `HeldBytes.gradients`; 0 where peaks are not recorded.
    """

    gathered: int
    gradients: int


class Offloaded(NamedTuple):
    """Offloaded main parameters.

    Attributes:
        num_bytes: of these parameters.
        moved_bytes: bytes read and written so far.
        wait_seconds: how long gathers have waited for reads so far.
    """

    num_bytes: int
    moved_bytes: int
    wait_seconds: float


class Gauge:
    """A number of bytes and its peak.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def restart(self) -> None:
        """Start a new peak at the current value."""
        self.peak = self.now

    def add(self, change: int) -> None:
        """Add `change` bytes, which may be negative."""
        self.set(self.now + change)

    def set(self, value: int) -> None:
        """Set the number."""
        self.now = value
        self.peak = max(self.peak, value)


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, which are then added to it."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
