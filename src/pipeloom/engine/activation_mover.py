"""`ActivationMover`: what OFFLOAD and RELOAD ask of the offload of activations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager

from torch import Tensor

from pipeloom.engine.overlap_times import OverlapTimes

Key = tuple[int, int | None, int | None]  # one activation: stage, micro-batch, slice


class ActivationMover(ABC):
    """Offloads what the forwards of one rank saved for their backwards, and reloads it, behind OFFLOAD and RELOAD.

    Attributes:
        moved_bytes: bytes written and read so far.
        wait_seconds: how long the rank has waited for moves so far.
        times: where it records when moves were running.
    """

    moved_bytes: int
    wait_seconds: float
    times: OverlapTimes

    @abstractmethod
    def catching(self, key: Key) -> AbstractContextManager[None]:
        """Around a forward: collects the tensors that autograd saves."""

    @abstractmethod
    def offload(self, key: Key, leaves: Sequence[Tensor], held: Set[int]) -> None:
        """Start to write the collected tensors and `leaves`, except storages (``_cdata``) in `held`, and free them."""

    @abstractmethod
    def reload(self, key: Key) -> None:
        """Start to read them back."""

    @abstractmethod
    def arrive(self, key: Key) -> None:
        """Wait until they are back. Raises RunError where a move failed."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything that is collected or offloaded."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""
