"""Spans of a timeline, and the rows of spans and the curves of large timelines as arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from pipeloom.ir import Action

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

T = TypeVar("T")
Point = tuple[float, float]


class Span(NamedTuple):
    """One action from `start` to `end`, in seconds since the first computation of the step."""

    action: Action
    start: float
    end: float


class Collective(NamedTuple):
    """A collective between the processes that share a stage, inside an action.

    Attributes:
        axis: of the mesh, such as "tp"; several are joined by "+".
        name: such as "all_reduce".
        start, end: seconds, as those of a `Span`; waiting for the other processes included.
        num_bytes: sent by one process.
    """

    axis: str
    name: str
    start: float
    end: float
    num_bytes: int


class _Columns(Sequence[T]):
    """A sequence in arrays, which equals the tuple of its members."""

    __slots__ = ()

    @abstractmethod
    def _member(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        at = range(len(self))[index]
        return self._member(at) if isinstance(at, int) else tuple(map(self._member, at))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class SpanRow(_Columns[Span]):
    """The spans of one rank's computations.

    Args:
        actions: in execution order.
        starts, ends: seconds of each action, shape (len(actions),).
    """

    __slots__ = ("actions", "ends", "starts")

    def __init__(self, actions: Sequence[Action], starts: Floats, ends: Floats) -> None:
        self.actions, self.starts, self.ends = actions, starts, ends

    @property
    def busy(self) -> float:
        """Seconds in which the rank computes."""
        return float((self.ends - self.starts).sum())

    def __len__(self) -> int:
        return len(self.actions)

    def _member(self, index: int) -> Span:
        return Span(self.actions[index], float(self.starts[index]), float(self.ends[index]))

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self.actions, self.starts.tolist(), self.ends.tolist())


class Curve(_Columns[Point]):
    """Points ``(seconds, value)`` of a step curve that starts with (0, 0).

    Args:
        times, values: of all later points, of equal shape.
    """

    __slots__ = ("times", "values")

    def __init__(self, times: Floats, values: Floats) -> None:
        self.times, self.values = times, values

    @property
    def peak(self) -> float:
        return max(0.0, float(self.values.max())) if len(self.values) else 0.0

    def __len__(self) -> int:
        return 1 + len(self.times)

    def _member(self, index: int) -> Point:
        return (float(self.times[index - 1]), float(self.values[index - 1])) if index else (0.0, 0.0)

    def __iter__(self) -> Iterator[Point]:
        yield (0.0, 0.0)
        yield from zip(self.times.tolist(), self.values.tolist(), strict=True)
