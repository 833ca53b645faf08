"""`MemoryUse`: the memory of one process's ranks, now and at its peak."""

from collections.abc import Mapping
from typing import NamedTuple

from pipeloom.engine.rank_state import RankState
from pipeloom.engine.stores.held_bytes import HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_store import ParameterStore


class OffloadTraffic(NamedTuple):
    """Transfers of activations and main parameters so far.

    Attributes:
        moved_bytes: bytes written and read.
        wait_seconds: how long ranks waited for transfers. An optimizer counts its own waits.
    """

    moved_bytes: int
    wait_seconds: float


class MemoryUse:
    """`Pipeline.memory`: the memory of one process."""

    def __init__(self, stores: Mapping[int, ParameterStore], ranks: Mapping[int, RankState]) -> None:
        self._stores, self._ranks = stores, ranks

    @property
    def live_activations(self) -> dict[int, int]:
        """Per rank of this process, the activations held now; zero between steps."""
        return {rank: len(held.saved) - held.num_offloaded for rank, held in self._ranks.items()}

    @property
    def peak_live_activations(self) -> dict[int, int]:
        """Per rank of this process, the peak number of activations in the last run."""
        return {rank: held.peak_live for rank, held in self._ranks.items()}

    def held_bytes(self) -> HeldBytes:
        """Bytes of parameters and gradients now, by kind."""
        held = [store.held_bytes() for store in self._stores.values()]
        return HeldBytes(*map(sum, zip(*held, strict=True)))

    def record_peaks(self, wanted: bool = True) -> None:
        """Whether runs measure gradients for `peak_bytes`, which takes some time."""
        for store in self._stores.values():
            store.records_peaks = wanted

    def peak_bytes(self) -> PeakBytes:
        """The peak bytes of gathered parameters and of gradients in the last run, summed over ranks."""
        peaks = [store.peak_bytes() for store in self._stores.values()]
        return PeakBytes(*map(sum, zip(*peaks, strict=True)))

    @property
    def offloaded_parameters(self) -> Offloaded:
        """Bytes and transfers of offloaded main parameters."""
        return Offloaded(*map(sum, zip(*(store.offloaded for store in self._stores.values()), strict=True)))

    @property
    def offload_traffic(self) -> OffloadTraffic:
        """Transfers of activations and main parameters so far."""
        movers = [held.wiring.mover for held in self._ranks.values() if held.wiring.mover is not None]
        parameters = self.offloaded_parameters
        return OffloadTraffic(
            sum(mover.moved_bytes for mover in movers) + parameters.moved_bytes,
            sum(mover.wait_seconds for mover in movers) + parameters.wait_seconds,
        )
