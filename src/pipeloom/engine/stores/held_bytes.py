"""Bytes of a rank's parameters and gradients: held now, at their peak, and offloaded."""

from collections.abc import Iterable
from typing import NamedTuple, Self

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
    def of(cls, modules: Iterable[nn.Module], main: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> Self:
        """Counted storage by storage, each once and as the first kind that has it."""
        seen: set[int] = set()
        counts = []
        for tensors in ((p for module in modules for p in module.parameters()), main, gradients):
            storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors) if s._cdata not in seen}
            seen |= storages.keys()
            counts.append(sum(storage.nbytes() for storage in storages.values()))
        return cls(*counts)


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
