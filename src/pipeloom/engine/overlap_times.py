"""What overlaps a rank's computations: `ActivationMover` moves activations, `OverlapTimes` records when it ran."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from pipeloom.ir import Action

Key = tuple[int, int | None, int | None]  # one activation: stage, micro-batch, slice
Wait = Callable[[], None]  # returns when a collective or transfer has ended


def no_wait() -> None:
    """The `Wait` where nothing is in flight."""


class OverlapTimes:
    """Collectives and transfers that overlapped the actions of one rank in its last run. Times: perf_counter seconds.

    Attributes:
        action: the running action, to which collectives that start now belong; None: nothing is recorded.
        waits: seconds that each action waited for collectives and transfers.
    """

    def __init__(self) -> None:
        self.action: Action | None = None
        self.waits: dict[Action, float] = {}
        self._spans: list[_Span] = []

    def begin(self) -> None:
        """A run begins."""
        self.action, self.waits, self._spans = None, {}, []

    def started(self, action: Action) -> Callable[[], None]:
        """Record that a collective or transfer of `action` has started.

        Returns:
            A function that records the end, callable from any thread. Only its first call counts.
        """
        span = _Span(action, perf_counter())
        self._spans.append(span)
        return span.stop

    def running(self, action: Action, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, with `action` as the running action."""

        def recorded() -> None:
            self.action = action
            try:
                run()
            finally:
                self.action = None

        return recorded

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a collective or transfer."""
        start = perf_counter()
        try:
            yield
        finally:
            if self.action is not None:
                self.waits[self.action] = self.waits.get(self.action, 0.0) + perf_counter() - start

    def records(self) -> list[tuple[Action, float, float]]:
        """What has ended, in the order of the starts; one record per collective or transfer."""
        return [(span.action, span.start, span.end) for span in self._spans if span.end is not None]


@dataclass(slots=True)
class _Span:
    action: Action
    start: float
    end: float | None = None

    def stop(self) -> None:
        if self.end is None:
            self.end = perf_counter()


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
