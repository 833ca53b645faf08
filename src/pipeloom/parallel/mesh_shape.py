"""`MeshShape`: mesh axes and rank order, as arithmetic. No torch here.

    axes     dp  data parallelism               cp  context parallelism
             pp  pipeline parallelism           tp  tensor parallelism

    order ("dp", "pp") of 2 x 3         dp 0   dp 1              order ("pp", "dp")     dp 0   dp 1
                                pp 0      0      3                             pp 0       0      1
                                pp 1      1      4                             pp 1       2      3
                                pp 2      2      5                             pp 2       4      5

The last axis is the innermost: its neighbours have adjacent ranks, which launchers place on one machine. Put the axes
that communicate most innermost.

Expert parallelism divides the replicas along `expert_axes` (dp, cp or both) into lines of their own:

    ep       processes that share the experts of a layer: the innermost part of the line along `expert_axes`
    edp      expert-data replicas: processes along dp and cp with the same coordinate on ep

    dp 4, ep 2        process     0  1  2  3
                      ep          0  1  0  1         lines along ep: 0 1 and 2 3
                      edp         0  0  1  1         lines along edp: 0 2 and 1 3
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either

AXES = ("dp", "pp", "cp", "tp")
EXPERT_LINES = ("ep", "edp")
_REPLICAS = ("dp", "cp")  # axes along which processes have the same dense parameters


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of named axes, outermost first. Made by `of`.

    Attributes:
        axes: names, outermost first.
        degrees: number of processes along each axis.
        ep: degree of expert parallelism.
        expert_axes: the axes that it divides, in the order of `axes`.
    """

    axes: tuple[str, ...]
    degrees: tuple[int, ...]
    ep: int = 1
    expert_axes: tuple[str, ...] = ("dp",)

    @classmethod
    def of(
        cls,
        degrees: Mapping[str, int],
        *,
        num_processes: int | None = None,
        order: Sequence[str] = AXES,
        ep: int = 1,
        expert_axes: Sequence[str] = ("dp",),
    ) -> Self:
        """The shape with these degrees.

        Args:
            degrees: by axis; missing axes have degree 1. One may be -1: all remaining processes.
            num_processes: number of processes; None: the product of the degrees.
            order: axes, outermost first; missing axes are innermost and have degree 1.
            ep: degree of expert parallelism, a divisor of the number of processes along `expert_axes`.
            expert_axes: dp, cp or both.

        Raises:
            InputError: an unknown or repeated axis, an invalid degree, degrees that do not match the number of
                processes, -1 twice or without a number of processes.
        """
        if not isinstance(degrees, Mapping):
            raise InputError(f"degrees={degrees!r}: must be a mapping of mesh axes, such as {{'pp': 2, 'dp': 2}}.")
        for axis in (*order, *degrees):
            _check_own_axis(axis)
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
        filled = _filled([degrees.get(axis, 1) for axis in axes], axes, num_processes)
        _check_experts(ep, expert_axes, dict(zip(axes, filled, strict=True)))
        return cls(axes, filled, ep, tuple(axis for axis in axes if axis in expert_axes))

    @property
    def num_processes(self) -> int:
        """The number of processes of the whole mesh."""
        return math.prod(self.degrees)

    def degree(self, axis: str) -> int:
        """The degree of an axis, or of ep or edp. Raises InputError for an unknown axis."""
        check_axis(axis)
        if axis == "ep":
            return self.ep
        if axis == "edp":
            return math.prod(map(self.degree, _REPLICAS)) // self.ep
        return self.degrees[self.axes.index(axis)]

    def coordinate(self, axis: str, process: int) -> int:
        """The coordinate of a process on an axis, or on ep or edp. Raises InputError for an unknown axis."""
        check_axis(axis)
        if axis == "ep":
            return self.along_all(self.expert_axes, process).index(process) % self.ep
        if axis == "edp":
            return self.along(axis, process).index(process)
        return self.coordinates(process)[axis]

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
        """The processes that share all coordinates but this axis with `process`, in the order of the axis.

        Along ep: those that share the experts of `process`. Along edp: its expert-data replicas, in order of rank where
        dp lies outside of cp.
        """
        if axis == "ep":
            line = self.along_all(self.expert_axes, process)
            start = line.index(process) // self.ep * self.ep
            return line[start : start + self.ep]
        if axis == "edp":
            own = self.coordinate("ep", process)
            return tuple(p for p in self.along_all(_REPLICAS, process) if self.coordinate("ep", p) == own)
        places = self.coordinates(process)
        return tuple(self.process({**places, axis: place}) for place in range(self.degree(axis)))

    def along_all(self, axes: Sequence[str], process: int) -> tuple[int, ...]:
        """The processes that share all coordinates but `axes` with `process`, in the order of the last axis first."""
        found = [process]
        for axis in axes:
            found = [member for start in found for member in self.along(axis, start)]
        return tuple(found)

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of processes along an axis."""
        starts = (process for process in range(self.num_processes) if self.coordinate(axis, process) == 0)
        return tuple(self.along(axis, process) for process in starts)

    def crosses_nodes(self, axis: str, processes_per_node: int) -> bool:
        """Whether processes along an axis are on several nodes, each with this number of adjacent processes."""
        return any(len({process // processes_per_node for process in line}) > 1 for line in self.lines(axis))

    def __str__(self) -> str:
        named = [(axis, degree) for axis, degree in zip(self.axes, self.degrees, strict=True) if degree > 1]
        text = " x ".join(f"{axis} {degree}" for axis, degree in named) or "one process"
        return text if self.ep == 1 else f"{text} with ep {self.ep} along {','.join(self.expert_axes)}"


def check_axis(axis: str) -> None:
    """Raises InputError for an unknown axis."""
    if axis not in AXES and axis not in EXPERT_LINES:
        raise InputError(f"mesh axis {axis!r} is unknown. Use {', '.join((*AXES, *EXPERT_LINES))}.")


def _check_own_axis(axis: str) -> None:
    """Raises InputError where an axis is unknown, or no axis of its own."""
    check_axis(axis)
    if axis in EXPERT_LINES:
        raise InputError(
            f"axis {axis!r} has no processes of its own: it divides the processes along expert_axes. Use ep=2, "
            "expert_axes=('dp',)."
        )


def _check_experts(ep: Any, expert_axes: Any, degrees: Mapping[str, int]) -> None:
    """Raises InputError where expert parallelism does not divide the replicas along `expert_axes`."""
    known = isinstance(expert_axes, tuple | list) and set(expert_axes) <= set(_REPLICAS)
    if not known or not expert_axes or len(set(expert_axes)) < len(expert_axes):
        raise InputError(f"expert_axes={expert_axes!r}: must be ('dp',), ('cp',) or ('dp', 'cp').")
    number = math.prod(degrees[axis] for axis in expert_axes)
    if type(ep) is not int or ep < 1 or number % ep:
        along = " and ".join(f"{axis}={degrees[axis]}" for axis in expert_axes)
        raise InputError(
            f"ep={ep!r}: must divide the {number} processes along {along} (expert_axes). Use "
            f"{either(divisors(number))}, or other degrees."
        )


def check_parts(parts: Mapping[str, int]) -> None:
    """Validate the axes of a grid into which tp is divided. Raises InputError for a name or degree that cannot be."""
    for name, degree in parts.items():
        if name in (*AXES, *EXPERT_LINES) or type(degree) is not int or degree < 1:
            raise InputError(
                f"a grid with {name}={degree!r}: names must be other than {', '.join(AXES)}, and degrees integers of "
                "at least 1. Use names such as tp_row and tp_column."
            )


def check_line(names: Sequence[str], parts: Mapping[str, int]) -> None:
    """Validate axes of a mesh, or `parts` of its tp, along which processes form one line.

    Raises:
        InputError: no axis, an unknown one, one twice, axes of the mesh together with parts of tp, or ep or edp
            together with dp or cp.
    """
    if not any(name in parts for name in names):
        for name in names:
            check_axis(name)
    if not names or len(set(names)) < len(names) or len({name in parts for name in names}) > 1:
        raise InputError(
            f"axes ({', '.join(names)}): must be axes of the mesh, or parts of tp "
            f"({', '.join(parts) or 'which is not divided'}), at least one and each once. Name others."
        )
    if any(name in EXPERT_LINES for name in names) and any(name in _REPLICAS for name in names):
        raise InputError(f"axes ({', '.join(names)}): ep and edp are parts of dp and cp. Name one kind.")


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
