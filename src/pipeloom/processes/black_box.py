"""`BlackBox`: a page of memory with a rank's step, action and error, which outlives the rank."""

import mmap
from typing import Any

from pipeloom.ir import Action

BLACKBOX_BYTES = 64  # size of the label of the running action in a black box


def label_of(action: Action) -> bytes:
    """The label of `action` in a black box, padded with NULs."""
    return f"{action}".encode().ljust(BLACKBOX_BYTES, b"\0")[:BLACKBOX_BYTES]


class _Text:
    """A text in one part of the page, on one line; the part ends it where it is too long."""

    def __init__(self, start: int, stop: int) -> None:
        self.place = slice(start, stop)

    def __get__(self, box: "BlackBox", kind: type[Any] | None = None) -> str:
        return box.page[self.place].split(b"\0", 1)[0].decode(errors="replace")

    def __set__(self, box: "BlackBox", text: str) -> None:
        size = self.place.stop - self.place.start
        box.page[self.place] = " ".join(text.split()).encode()[: size - 1].ljust(size, b"\0")


class BlackBox:
    """A page of memory that a rank shares with the launcher. It outlives the rank.

    Attributes:
        action: the last action, such as ``1B3``; empty before the first.
        phase: the rank's current phase, such as ``step 12``.
        last_words: the error that ended the rank.
    """

    SIZE = 4096
    action, phase, last_words = _Text(0, BLACKBOX_BYTES), _Text(BLACKBOX_BYTES, 192), _Text(192, SIZE)

    def __init__(self, descriptor: int) -> None:
        self.page = mmap.mmap(descriptor, self.SIZE)

    @property
    def action_buffer(self) -> memoryview:
        """The part for the label of the running action, `BLACKBOX_BYTES` long."""
        return memoryview(self.page)[:BLACKBOX_BYTES]
