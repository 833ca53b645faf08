"""`pack`: which documents share a sample."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike


def pack(lengths: ArrayLike, capacity: int) -> list[list[int]]:
    """Pack documents into samples of at most `capacity` tokens: best-fit decreasing.

    The longest document comes first, and each goes where it leaves the least room.

    Args:
        lengths: tokens of each document, at most `capacity`.
        capacity: tokens of a sample.

    Returns:
        The documents of each sample, ascending.
    """
    sizes = np.asarray(lengths, np.int64)
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # ascending, those with a pack
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            number, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del rooms[place], by_room[room]
        packs[number].append(index)
        if room > size:
            if room - size not in by_room:
                insort(rooms, room - size)
            by_room.setdefault(room - size, []).append(number)
    return [sorted(each) for each in packs]
