"""`OverlapTimes`: when collectives and moves of a run were under way, and how long computations waited for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from pipeloom.ir import Action

Wait = Callable[[], None]  # returns when something that was started has ended


def no_wait() -> None:
    """The `Wait` of something that is there already."""


_Record = tuple[Action, float, float]


class OverlapTimes:
    """What ran beside the actions of one rank in its last run; all times are those of time.perf_counter, in seconds.

    Attributes:
        action: what the rank runs now, for those who begin something in it; None: nobody wants to know.
        waits: for each action that waited for what ran beside it, how long.
    """

    def __init__(self) -> None:
        self.action: Action | None = None
        self.waits: dict[Action, float] = {}
        self._spans: list[_Span] = []

    def begin(self) -> None:
        """A run begins."""
        self.action, self.waits, self._spans = None, {}, []

    def started(self, action: Action) -> Callable[[], None]:
        """Something for `action` is under way from now on; call what is returned when it has ended, from any thread.

        The first call counts.
        """
        span = _Span(action)
        self._spans.append(span)
        return span.stop

    def running(self, action: Action, run: Callable[[], None]) -> Callable[[], None]:
        """`run` as that of `action`."""

        def noted() -> None:
            self.action = action
            try:
                run()
            finally:
                self.action = None

        return noted

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for something that was started."""
        start = perf_counter()
        try:
            yield
        finally:
            if self.action is not None:
                self.waits[self.action] = self.waits.get(self.action, 0.0) + perf_counter() - start

    def records(self) -> list[_Record]:
        """What has ended, in the order in which it began; an action stands there as often as something was started."""
        return [(span.action, span.start, span.end) for span in self._spans if span.end is not None]


class _Span:
    __slots__ = ("action", "end", "start")

    def __init__(self, action: Action) -> None:
        self.action, self.start = action, perf_counter()
        self.end: float | None = None

    def stop(self) -> None:
        if self.end is None:
            self.end = perf_counter()
