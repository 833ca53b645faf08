"""`MeshShape`: mesh axes and rank order, as arithmetic. No torch here.

    axes     dp  data parallelism               cp  context parallelism
             pp  pipeline parallelism           ep  expert parallelism
                                                tp  tensor parallelism

    order ("dp", "pp") of 2 x 3         dp 0   dp 1              order ("pp", "dp")     dp 0   dp 1
                                pp 0      0      3                             pp 0       0      1
                                pp 1      1      4                             pp 1       2      3
                                pp 2      2      5                             pp 2       4      5

The last axis is the innermost: its neighbours have adjacent ranks, which launchers place on one machine. Put the axes
that communicate most innermost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

from pipeloom.errors import InputError

AXES = ("dp", "pp", "cp", "ep", "tp")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of named axes, outermost first. Made by `of`.

    Attributes:
        axes: names, outermost first.
        degrees: number of processes along each axis.
    """

    axes: tuple[str, ...]
    degrees: tuple[int, ...]

    @classmethod
    def of(cls, degrees: Mapping[str, int], *, num_processes: int | None = None, order: Sequence[str] = AXES) -> Self:
        """The shape with these degrees.

        Args:
            degrees: by axis; missing axes have degree 1. One may be -1: all remaining processes.
            num_processes: number of processes; None: the product of the degrees.
            order: axes, outermost first; missing axes are innermost and have degree 1.

        Raises:
            InputError: an unknown or repeated axis, an invalid degree, degrees that do not match the number of
                processes, -1 twice or without a number of processes.
        """
        if not isinstance(degrees, Mapping):
            raise InputError(f"degrees={degrees!r}: must be a mapping of mesh axes, such as {{'pp': 2, 'dp': 2}}.")
        for axis in (*order, *degrees):
            check_axis(axis)
        if len(set(order)) != len(order):
            raise InputError(f"mesh order {','.join(order)} names an axis twice. Name each axis once.")
        for axis, degree in degrees.items():
            if type(degree) is not int or (degree < 1 and degree != -1):
                raise InputError(
                    f"mesh axis {axis} has degree {degree!r}: must be an integer of at least 1, or -1 for all "
                    "remaining processes."
                )
            if degree != 1 and axis not in order:
                raise InputError(
                    f"mesh axis {axis} has degree {degree} and is not in the order {','.join(order)}. Add it there."
                )
        axes = (*order, *(axis for axis in AXES if axis not in order))
        return cls(axes, _filled([degrees.get(axis, 1) for axis in axes], axes, num_processes))

    @property
    def num_processes(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.degrees)

    def degree(self, axis: str) -> int:
        """The degree of an axis. Raises InputError for an unknown axis."""
        check_axis(axis)
        return self.degrees[self.axes.index(axis)]

    def coordinates(self, process: int) -> dict[str, int]:
        """The coordinates of a process, by axis."""
        if not 0 <= process < self.num_processes:
            raise InputError(f"process {process}: must be from 0 to {self.num_processes - 1} in this mesh.")
        places = {}
        for axis, degree in zip(reversed(self.axes), reversed(self.degrees), strict=True):
            process, places[axis] = divmod(process, degree)
        return places

    def process(self, coordinates: Mapping[str, int]) -> int:
        """The process with these coordinates, the inverse of `coordinates`. Missing axes count as 0."""
        process = 0
        for axis, degree in zip(self.axes, self.degrees, strict=True):
            process = process * degree + coordinates.get(axis, 0)
        return process

    def along(self, axis: str, process: int) -> tuple[int, ...]:
        """The processes that share all coordinates but this axis with `process`, in the order of the axis."""
        places = self.coordinates(process)
        return tuple(self.process({**places, axis: place}) for place in range(self.degree(axis)))

    def along_all(self, axes: Sequence[str], process: int) -> tuple[int, ...]:
        """The processes that share all coordinates but `axes` with `process`, in the order of the last axis first."""
        places = self.coordinates(process)
        ranges = [range(self.degree(axis)) for axis in axes]
        return tuple(self.process({**places, **dict(zip(axes, found, strict=True))}) for found in product(*ranges))

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of processes along an axis."""
        starts = (process for process in range(self.num_processes) if self.coordinates(process)[axis] == 0)
        return tuple(self.along(axis, process) for process in starts)

    def crosses_nodes(self, axis: str, processes_per_node: int) -> bool:
        """Whether processes along an axis are on several nodes, each with this number of adjacent processes."""
        return any(len({process // processes_per_node for process in line}) > 1 for line in self.lines(axis))

    def __str__(self) -> str:
        named = [(axis, degree) for axis, degree in zip(self.axes, self.degrees, strict=True) if degree > 1]
        return " x ".join(f"{axis} {degree}" for axis, degree in named) or "one process"


def check_axis(axis: str) -> None:
    """Raises InputError for an unknown axis."""
    if axis not in AXES:
        raise InputError(f"mesh axis {axis!r} is unknown. Use {', '.join(AXES)}.")


def check_parts(parts: Mapping[str, int]) -> None:
    """Validate the axes of a grid into which tp is divided. Raises InputError for a name or degree that cannot be."""
    for name, degree in parts.items():
        if name in AXES or type(degree) is not int or degree < 1:
            raise InputError(
                f"a grid with {name}={degree!r}: names must be other than {', '.join(AXES)}, and degrees integers of "
                "at least 1. Use names such as tp_row and tp_column."
            )


def check_line(names: Sequence[str], parts: Mapping[str, int]) -> None:
    """Validate axes of a mesh, or `parts` of its tp, along which processes form one line.

    Raises:
        InputError: no axis, an unknown one, one twice, or axes of the mesh together with parts of tp.
    """
    if not any(name in parts for name in names):
        for name in names:
            check_axis(name)
    if not names or len(set(names)) < len(names) or len({name in parts for name in names}) > 1:
        raise InputError(
            f"axes ({', '.join(names)}): must be axes of the mesh, or parts of tp "
            f"({', '.join(parts) or 'which is not divided'}), at least one and each once. Name others."
        )


def _filled(degrees: list[int], axes: Sequence[str], num_processes: int | None) -> tuple[int, ...]:
    """`degrees` with -1 replaced, checked against the number of processes."""
    text = " x ".join(f"{axis} {degree}" for axis, degree in zip(axes, degrees, strict=True) if degree != 1)
    known = math.prod(degree for degree in degrees if degree != -1)
    if degrees.count(-1) > 1:
        raise InputError(f"a mesh of {text}: only one degree can be -1. Give the others.")
    if num_processes is None:
        if -1 in degrees:
            raise InputError(f"a mesh of {text}: -1 needs a number of processes. Give a degree of at least 1.")
        return tuple(degrees)
    rest, over = divmod(num_processes, known)
    if -1 not in degrees and known != num_processes:
        raise InputError(
            f"a mesh of {text or 'one process'} needs {_count(known)}: there are {num_processes}. Start "
            f"{_count(known)}, or use degrees with a product of {num_processes}."
        )
    if over or not rest:
        raise InputError(
            f"a mesh of {text} for {num_processes} processes: their number must be a multiple of {known}. "
            f"Start {known * (rest + 1)}."
        )
    return tuple(rest if degree == -1 else degree for degree in degrees)


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
