"""The head of a memory for copies of a rank's state: int64 numbers that the launcher reads too. No torch."""

import os
import struct
from collections.abc import Iterable

HEAD_BYTES = 4096
# The step + 1 of a complete copy, else 0; bytes of its text; of memory 0 also: the step + 1 after which the run began,
# and the step that has begun last.
SEAL, LENGTH, FIRST, BEGUN = range(4)
_NUMBER = struct.Struct("=q")


def read_number(descriptor: int, index: int) -> int:
    """A number of the head; 0 before it was written."""
    data = os.pread(descriptor, _NUMBER.size, index * _NUMBER.size)
    return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else 0


def write_number(descriptor: int, index: int, value: int) -> None:
    """Write a number of the head."""
    os.pwrite(descriptor, _NUMBER.pack(value), index * _NUMBER.size)


def steps_of(memories: Iterable[int]) -> set[int]:
    """The steps of which memories have complete copies."""
    return {step for memory in memories if (step := read_number(memory, SEAL) - 1) >= 0}


def common_step(groups: Iterable[Iterable[int]]) -> int:
    """The newest step of which each group of memories has a complete copy; -1: there is none."""
    steps = [steps_of(memories) for memories in groups]
    return max(set.intersection(*steps), default=-1) if steps else -1
