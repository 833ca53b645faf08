"""Cost of one slice of a sequence on one rank: the linear form of TeraPipe (arXiv:2102.07988), and its JSON file.

    t(b, l, ctx) = base(b l) + [ctx > 0] (a0 + b (a1 l + a2 ctx + a3 l ctx)) + latency + seconds_per_token_sent b l

`l` tokens of each of `b` sequences attend to themselves and to the `ctx` tokens before them. `base` is measured, and
interpolated between the measured lengths; the context part is fitted by least squares (`fit`). The last two
terms are the message to the next rank; as in the paper, both ranks are busy during it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import Entry, read_json
from pipeloom.errors import InputError, folded
from pipeloom.sim.costs import MOST

Array = NDArray[np.float64]


class SliceTime(Protocol):
    """Any callable ``(batch, length, context) -> (forward seconds, backward seconds)`` of one rank on one slice.

    It is called with numbers. With an attribute ``takes_arrays = True`` it is called once with arrays of lengths and
    contexts, which is much faster for thousands of tokens.
    """

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Any, Any]: ...


def ask(stage: SliceTime, batch: int, length: Any, context: Any) -> Array:
    """Forward and backward seconds by a rank's costs: shape (2,), or (2, slices) for arrays.

    Raises:
        InputError: the costs do not return a pair of numbers.
    """
    answer: Any = stage(batch, length, context)
    try:
        forward, backward = answer
        if np.ndim(length) == 0:
            return np.array([float(forward), float(backward)])
        return np.array([np.broadcast_to(np.asarray(each, np.float64), np.shape(length)) for each in answer])
    except (TypeError, ValueError, OverflowError) as error:
        said = "too large" if isinstance(error, OverflowError) else folded(answer)
        raise InputError(
            f"costs={said}: must return two numbers, the seconds of the forward and of the backward. Return both."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Seconds of one rank's share, forward or backward.

    Attributes:
        base: ``(tokens, seconds)`` without context, tokens ascending. It is constant below the first point, and
            extrapolated beyond the last (from the origin, if there is only one point).
        context: a0, a1, a2, a3.
    """

    base: tuple[tuple[float, float], ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        check_fields(self)
        tokens = [tokens for tokens, _ in self.base]
        if not self.base or not all(a < b for a, b in pairwise([0.0, *tokens])):
            raise InputError(
                f"base has tokens {tokens}: needs at least one point, tokens above 0 and ascending. Sort the points."
            )

    def __call__(self, batch: int, length: Any, context: Any) -> Array:
        """Seconds of slices of `length` tokens of `batch` sequences, `context` tokens before each."""
        length, context = np.asarray(length, dtype=np.float64), np.asarray(context, dtype=np.float64)
        tokens, seconds = np.array([(0.0, 0.0), *self.base]).T
        asked = batch * length
        a0, a1, a2, a3 = self.context
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values are rejected where they are used
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
            base = np.interp(asked, tokens[1:], seconds[1:]) + slope * np.maximum(asked - tokens[-1], 0.0)
            extra = a0 + batch * (a1 * length + a2 * context + a3 * length * context)
            return np.asarray(base + np.where(context > 0, extra, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCosts:
    """One rank's share of a model: forward, backward, and the message that follows either.

    Attributes:
        forward, backward: seconds of computations.
        latency: latency per message in seconds.
        seconds_per_token_sent: further seconds per token of a message.
    """

    takes_arrays: ClassVar[bool] = True
    forward: LinearTime
    backward: LinearTime
    latency: float = 0.0
    seconds_per_token_sent: float = 0.0

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Array, Array]:
        message = self.latency + self.seconds_per_token_sent * batch * np.asarray(length, dtype=np.float64)
        return self.forward(batch, length, context) + message, self.backward(batch, length, context) + message

    def to_json(self) -> str:
        """The text of a costs file; `parse_slice_costs` reads it back exactly."""
        return json.dumps(asdict(self))


class Sample(NamedTuple):
    """One measurement: `length` tokens after `context` others took `seconds`, for one sequence."""

    length: int
    context: int
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[LinearTime, float]:
    """The linear form of measurements, and its error.

    The base is the median time of each length without context. The context part is fitted to the rest by least squares.
    Both minimise relative errors, so that long slices do not dominate. Both are constrained not to fall with more
    tokens or context, so that noise cannot make times negative between or beyond the measurements.

    Args:
        samples: measurements.

    Returns:
        The form, and the root mean square of the relative error over the samples that it does not meet exactly (0 if
        there are none).

    Raises:
        InputError: no sample without context, or a time that is not above 0.
    """
    alone: dict[int, list[float]] = defaultdict(list)
    for length, context, seconds in samples:
        if not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"seconds={seconds} of a slice of {length} tokens: must be above 0. Measure it again.")
        if context == 0:
            alone[length].append(seconds)
    if not alone:
        raise InputError("samples: the base needs slices without context. Add samples with context=0.")
    lengths = sorted(alone)
    base = _rising([median(alone[length]) for length in lengths])
    fitted = LinearTime(base=tuple((float(length), time) for length, time in zip(lengths, base, strict=True)))
    length, context, seconds = np.array(samples, dtype=np.float64).T
    behind = context > 0
    if behind.any():
        terms = np.stack([np.ones_like(length), length, context, length * context], axis=1)[behind]
        scale = terms.max(axis=0)  # values from 1 to lengths squared: without it the fit loses digits
        wanted = 1 - fitted(1, length, 0)[behind] / seconds[behind]
        a0, a1, a2, a3 = (float(a) for a in _nonnegative(terms / scale / seconds[behind, None], wanted) / scale)
        fitted = LinearTime(base=fitted.base, context=(a0, a1, a2, a3))
    error = fitted(1, length, context) / seconds - 1
    missed = error[np.abs(error) > 1e-12]
    return fitted, float(np.sqrt(np.mean(missed**2))) if len(missed) else 0.0


def _rising(seconds: Sequence[float]) -> list[float]:
    """The nearest non-decreasing times by relative error."""
    if all(a <= b for a, b in pairwise(seconds)):
        return list(seconds)
    steps = np.tril(np.ones((len(seconds), len(seconds))))  # every time is a sum of steps that are 0 or more
    times = np.array(seconds)
    return [float(time) for time in np.cumsum(_nonnegative(steps / times[:, None], np.ones_like(times)))]


def _nonnegative(matrix: Array, wanted: Array) -> Array:
    from scipy.optimize import nnls  # costs from a file need no scipy

    return np.asarray(nnls(matrix, wanted, maxiter=100 * matrix.shape[1])[0])


_PHASES = ("forward", "backward")
_MESSAGE = ("latency", "seconds_per_token_sent")
_FORM = (
    '{"forward": {"base": [[tokens, seconds], ...], "context": [a0, a1, a2, a3]}, "backward": {...}, "latency": '
    'seconds, "seconds_per_token_sent": seconds}'
)


def parse_slice_costs(text: str) -> SliceCosts:
    """Read the JSON of a costs file; `context`, `latency` and `seconds_per_token_sent` default to 0.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the key and the rule.
    """
    data = read_json(text, "the slice costs file", _FORM).fields(_PHASES, _MESSAGE)
    forward, backward = (_phase(data[name]) for name in _PHASES)
    message = {name: data[name].number(most=MOST) for name in _MESSAGE if name in data}
    return SliceCosts(forward=forward, backward=backward, **message)


def _phase(phase: Entry) -> LinearTime:
    data = phase.fields(("base",), ("context",))
    points = [point.members(length=2) for point in data["base"].members()]
    base = tuple((tokens.number(above=True, most=MOST), seconds.number(most=MOST)) for tokens, seconds in points)
    a0, a1, a2, a3 = (0.0,) * 4
    if "context" in data:
        a0, a1, a2, a3 = (a.number(least=-MOST, most=MOST) for a in data["context"].members(length=4))
    try:
        return LinearTime(base=base, context=(a0, a1, a2, a3))
    except InputError as error:
        raise InputError(f"{phase.place}: {error}") from error
