"""`Notes`: what a rank notes while it trains, in memory that outlives it and that the other ranks read. No torch."""

import os
import struct

from pipeloom.processes.host_memory import telling_of_memory

_PART_BYTES = 1 << 26  # of the address space of a file without blocks in between
_HEAD = struct.Struct("qq")  # key, length
_EMPTY = -1


class Notes:
    """The notes of one rank: parts with a content and a key each; the key is written last.

    Args:
        descriptor: of the memory, a file of any size.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, part: int, key: int, content: bytes = b"") -> None:
        """Replace a part; `key` is 0 or more. A process that is killed meanwhile leaves an empty part."""
        self.clear(part)
        self._put(content, part * _PART_BYTES + _HEAD.size)
        self._put(_HEAD.pack(key, len(content)), part * _PART_BYTES)

    def clear(self, part: int) -> None:
        """Empty a part."""
        self._put(_HEAD.pack(_EMPTY, 0), part * _PART_BYTES)

    def key(self, part: int) -> int | None:
        """The key of a part; None if it is empty."""
        key, _ = self._head(part)
        return None if key == _EMPTY else key

    def read(self, part: int, key: int) -> bytes | None:
        """The content of a part; None if it has another key."""
        found, length = self._head(part)
        if found != key:
            return None
        return os.pread(self._descriptor, length, part * _PART_BYTES + _HEAD.size)

    def _put(self, content: bytes, place: int) -> None:
        with telling_of_memory("notes for --recover", place + len(content)):
            os.pwrite(self._descriptor, content, place)

    def _head(self, part: int) -> tuple[int, int]:
        data = os.pread(self._descriptor, _HEAD.size, part * _PART_BYTES)
        return _HEAD.unpack(data) if len(data) == _HEAD.size else (_EMPTY, 0)
