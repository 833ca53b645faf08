"""Spans, and rows and curves of large timelines as arrays; the steady state of spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeloom.ir import Action, Op, Schedule

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


class _Columns(Sequence[T]):
    """A sequence in arrays, which equals the tuple of its members."""

    __slots__ = ()

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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(map(Span, self.actions[index], self.starts[index].tolist(), self.ends[index].tolist()))
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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        at = range(len(self))[index] - 1
        return (0.0, 0.0) if at < 0 else (float(self.times[at]), float(self.values[at]))

    def __iter__(self) -> Iterator[Point]:
        yield (0.0, 0.0)
        yield from zip(self.times.tolist(), self.values.tolist(), strict=True)


def steady_period(schedule: Schedule, compute_spans: Sequence[Sequence[Span]]) -> float | None:
    """Seconds per micro-batch in the steady state of a stream; None where the stream is too short for one.

    Warm-up and cool-down are left out. Of the backwards of the input stage that end before one of its ranks begins its
    last forward, the later half is measured. That is an integer number of update periods, in which all replicas have
    had the same number of turns. In a short stream the measured half may still contain a part of the warm-up.

    Args:
        schedule: of the stream.
        compute_spans: for each rank, the spans of its computations.
    """
    ranks = schedule.placement.replicas[0]
    ends: dict[int, float] = {}
    last_forward = float("inf")
    for rank in ranks:
        row = [span for span in compute_spans[rank] if span.action.stage == 0]
        last_forward = min(last_forward, max((start for (_, op, _, _), start, _ in row if op is Op.F), default=0.0))
        ends |= {b: end for (_, op, b, _), _, end in row if op in (Op.B, Op.W) and b is not None}
    full = 0
    while full in ends and ends[full] <= last_forward:
        full += 1
    size = schedule.update_period
    micro_batches = (full // size + 1) // 2 * size
    if not 0 < micro_batches < full:
        return None
    return (ends[full - 1] - ends[full - 1 - micro_batches]) / micro_batches
