"""`RepeatedDraws`: a recomputation draws the numbers of its forward from Python's and numpy's generators."""

from collections.abc import Callable
from typing import Any

from pipeloom.common.random_states import RandomStates


class RepeatedDraws:
    """A function that draws the same numbers of Python's and numpy's global generators in every call.

    Args:
        function: called first in a forward, and again in recomputations.
        exactly: whether to notice that it draws only the second number of numpy's last pair of normal ones.

    Attributes:
        drew: whether the first call has drawn, or another thread meanwhile: the generators are of the process.
    """

    def __init__(self, function: Callable[..., Any], *, exactly: bool) -> None:
        self._function, self._exactly = function, exactly
        self._first: RandomStates | None = None
        self._called = self.drew = False

    def __call__(self, *args: Any, **settings: Any) -> Any:
        if not self._called:
            self._called = True
            before = RandomStates.now(quickly=not self._exactly)
            result = self._function(*args, **settings)
            self.drew = RandomStates.now(quickly=not self._exactly) != before
            if self.drew:
                self._first = before
            return result
        if self._first is None:
            return self._function(*args, **settings)
        now = RandomStates.now()
        self._first.restore()
        try:
            return self._function(*args, **settings)
        finally:
            now.restore()
