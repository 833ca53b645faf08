"""Spans and curves of large timelines as arrays, which compare equal to the tuples of small timelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from pipeloom.ir.action import Action

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

Point = tuple[float, float]


class Span(NamedTuple):
    """One action from `start` to `end`, in seconds since the first computation of the step."""

    action: Action
    start: float
    end: float


class SpanRow(Sequence[Span]):
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

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...

    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        if isinstance(index, slice):
            columns = (self.actions[index], self.starts[index].tolist(), self.ends[index].tolist())
            return tuple(map(Span, *columns))
        return Span(self.actions[index], float(self.starts[index]), float(self.ends[index]))

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self.actions, self.starts.tolist(), self.ends.tolist())

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Curve(Sequence[Point]):
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

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Point, ...]: ...

    def __getitem__(self, index: int | slice) -> Point | tuple[Point, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        at = range(len(self))[index] - 1
        return (0.0, 0.0) if at < 0 else (float(self.times[at]), float(self.values[at]))

    def __iter__(self) -> Iterator[Point]:
        yield (0.0, 0.0)
        yield from zip(self.times.tolist(), self.values.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _equal(row: Sequence[Any], other: object) -> bool:
    return isinstance(other, Sequence) and len(row) == len(other) and tuple(row) == tuple(other)
