"""`BlackBox`: shared memory in which a rank records its current action and its error."""

from __future__ import annotations

import mmap

from pipeloom.ir import Action

BLACKBOX_BYTES = 64  # size of the label of the running action


def label_of(action: Action) -> bytes:
    """The label of `action` in a black box, padded with NULs."""
    return f"{action}".encode().ljust(BLACKBOX_BYTES, b"\0")[:BLACKBOX_BYTES]


class BlackBox:
    """A page of memory that a rank shares with the launcher. It outlives the rank."""

    _ACTION, _PHASE, _WORDS, SIZE = slice(0, BLACKBOX_BYTES), slice(BLACKBOX_BYTES, 192), slice(192, 4096), 4096

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, self.SIZE)

    @property
    def action_buffer(self) -> memoryview:
        """The part for the label of the running action, `BLACKBOX_BYTES` long."""
        return memoryview(self._map)[self._ACTION]

    def _get(self, place: slice) -> str:
        return self._map[place].split(b"\0", 1)[0].decode(errors="replace")

    def _set(self, place: slice, text: str) -> None:
        size = place.stop - place.start
        self._map[place] = text.encode()[: size - 1].ljust(size, b"\0")

    @property
    def action(self) -> str:
        """The last action, such as ``1B3``; empty before the first."""
        return self._get(self._ACTION)

    @property
    def phase(self) -> str:
        """The rank's current phase, such as ``step 12``."""
        return self._get(self._PHASE)

    @phase.setter
    def phase(self, text: str) -> None:
        self._set(self._PHASE, text)

    @property
    def last_words(self) -> str:
        """The error that ended the rank, in one line."""
        return self._get(self._WORDS)

    @last_words.setter
    def last_words(self, text: str) -> None:
        self._set(self._WORDS, " ".join(text.split()))
