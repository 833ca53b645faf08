"""`MeshShape`: which process stands where on named axes; arithmetic alone.

    axes     dp  copies of the pipeline         cp  pieces of a sequence (context)
             pp  ranks of the pipeline          ep  experts
                                                tp  pieces of a matrix (tensor)

    order ("dp", "pp") of 2 x 3         dp 0   dp 1              order ("pp", "dp")     dp 0   dp 1
                                pp 0      0      3                             pp 0       0      1
                                pp 1      1      4                             pp 1       2      3
                                pp 2      2      5                             pp 2       4      5

The innermost axis stands last: its neighbours have neighbouring numbers, which launchers put on one machine. So axes
that exchange most stand innermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeloom.errors import InputError

AXES = ("dp", "pp", "cp", "ep", "tp")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of named axes, outermost first. Made by `of`.

    Attributes:
        axes: names, outermost first.
        degrees: how many places each axis has.
    """

    axes: tuple[str, ...]
    degrees: tuple[int, ...]

    @classmethod
    def of(
        cls, degrees: Mapping[str, int], *, num_processes: int | None = None, order: Sequence[str] = AXES
    ) -> MeshShape:
        """The shape with these degrees.

        Args:
            degrees: by axis; axes that are not named have degree 1. One may be -1: what is left of the processes.
            num_processes: that there are; None: as many as the degrees make.
            order: axes, outermost first; those left out stand innermost and have degree 1.

        Raises:
            InputError: an axis that there is not or that stands twice, a degree that is no count, degrees that do not
                make up the processes, -1 twice or without a number of processes.
        """
        if not isinstance(degrees, Mapping):
            raise InputError(
                f"degrees of a mesh are {degrees!r}: they are a mapping, such as {{'pp': 2, 'dp': 2}}; write it"
            )
        for axis in (*order, *degrees):
            if axis not in AXES:
                raise InputError(f"mesh axis {axis!r} is unknown: axes are {', '.join(AXES)}; take one of them")
        if len(set(order)) != len(order):
            raise InputError(f"mesh order {','.join(order)} names an axis twice: each has one place; name it once")
        for axis, degree in degrees.items():
            if type(degree) is not int or (degree < 1 and degree != -1):
                raise InputError(
                    f"mesh axis {axis} has degree {degree!r}: a degree is a count, or -1 for the rest; give 1 or more"
                )
            if degree != 1 and axis not in order:
                raise InputError(
                    f"mesh axis {axis} has degree {degree} and no place in the order {','.join(order)}: name it there"
                )
        axes = (*order, *(axis for axis in AXES if axis not in order))
        return cls(axes, _filled([degrees.get(axis, 1) for axis in axes], axes, num_processes))

    @property
    def num_processes(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.degrees)

    def degree(self, axis: str) -> int:
        """How many places an axis has."""
        return self.degrees[self.axes.index(axis)]

    def coordinates(self, process: int) -> dict[str, int]:
        """Where a process stands, by axis."""
        if not 0 <= process < self.num_processes:
            raise InputError(f"process {process} of a mesh of {self.num_processes}: they count from 0; name one")
        places = {}
        for axis, degree in zip(reversed(self.axes), reversed(self.degrees), strict=True):
            process, places[axis] = divmod(process, degree)
        return places

    def process(self, coordinates: Mapping[str, int]) -> int:
        """Who stands there; the inverse of `coordinates`. Axes that are not named count as 0."""
        process = 0
        for axis, degree in zip(self.axes, self.degrees, strict=True):
            process = process * degree + coordinates.get(axis, 0)
        return process

    def along(self, axis: str, process: int) -> tuple[int, ...]:
        """The processes that stand with `process` on all axes but this one, in its order."""
        places = self.coordinates(process)
        return tuple(self.process({**places, axis: place}) for place in range(self.degree(axis)))

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All processes in groups along an axis; every process is in one of them."""
        starts = (process for process in range(self.num_processes) if self.coordinates(process)[axis] == 0)
        return tuple(self.along(axis, process) for process in starts)

    def __str__(self) -> str:
        named = [(axis, degree) for axis, degree in zip(self.axes, self.degrees, strict=True) if degree > 1]
        return " x ".join(f"{axis} {degree}" for axis, degree in named) or "one process"


def _filled(degrees: list[int], axes: Sequence[str], num_processes: int | None) -> tuple[int, ...]:
    """`degrees` with the number for -1, checked against the processes that there are."""
    text = " x ".join(f"{axis} {degree}" for axis, degree in zip(axes, degrees, strict=True) if degree != 1)
    known = math.prod(degree for degree in degrees if degree != -1)
    match degrees.count(-1), num_processes:
        case 0, None:
            return tuple(degrees)
        case 0, _:
            if known != num_processes:
                raise InputError(
                    f"a mesh of {text or 'one process'} for {num_processes} processes: it has {known}; start {known} "
                    "processes, or give other degrees"
                )
            return tuple(degrees)
        case 1, None:
            raise InputError(f"a mesh of {text} without processes: -1 is the rest of them; give a count")
        case 1, _:
            rest, over = divmod(num_processes or 0, known)
            if over or not rest:
                raise InputError(
                    f"a mesh of {text} for {num_processes} processes: -1 is the rest, so their number is a multiple "
                    f"of {known}; start {known * (rest + 1)}"
                )
            return tuple(rest if degree == -1 else degree for degree in degrees)
        case _:
            raise InputError(f"a mesh of {text}: -1 is the rest of the processes, so it stands once; give counts")
