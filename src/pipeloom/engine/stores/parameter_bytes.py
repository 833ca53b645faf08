"""How many bytes parameters and gradients take, counted from the memory that they lie in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn


class HeldBytes(NamedTuple):
    """What is held at one moment.

    Attributes:
        parameters: of modules, as far as they are gathered.
        masters: main parameters that lie in other memory: masters, shards.
        gradients: of modules and of main parameters, and what is on its way from one to the other.
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
    """The most that was held at one moment of the last run.

    Attributes:
        gathered: of parameters that are freed again (zero3).
        gradients: as `HeldBytes.gradients`; 0 where peaks are not recorded.
    """

    gathered: int
    gradients: int


class Offloaded(NamedTuple):
    """Main parameters that are in a store between updates.

    Attributes:
        num_bytes: of them.
        moved_bytes: read and written so far.
        wait_seconds: how long gathers have waited for reads so far.
    """

    num_bytes: int
    moved_bytes: int
    wait_seconds: float


class Gauge:
    """A number and its largest value.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def restart(self) -> None:
        """Forget the largest value."""
        self.peak = self.now

    def add(self, change: int) -> None:
        """Change the number."""
        self.set(self.now + change)

    def set(self, value: int) -> None:
        """Set the number."""
        self.now = value
        self.peak = max(self.peak, value)


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that have not been seen."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
