"""`LineLimit`: warnings that repeat, in at most one line per minute."""

from collections.abc import Hashable

_SECONDS_BETWEEN_LINES = 60.0


class LineLimit:
    """Collects texts, the last one per key, until a line is due."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}
        self._last = float("-inf")

    def add(self, key: Hashable, text: str) -> None:
        """Take a text for the next line, in place of an earlier one with this key."""
        self._texts[key] = text

    def line(self, now: float) -> str | None:
        """All texts since the last line, if there are any and the last line is a minute old; `now` in seconds."""
        if not self._texts or now - self._last < _SECONDS_BETWEEN_LINES:
            return None
        found = "; ".join(self._texts.values())
        self._texts, self._last = {}, now
        return found
