"""`OverlapTimes`: records when collectives and transfers overlapped a rank's computations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from pipeloom.ir import Action

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
