"""What one slice of a sequence costs one rank: the linear form of TeraPipe (arXiv:2102.07988), and its JSON file.

    t(b, l, ctx) = base(b l) + [ctx > 0] (a0 + b (a1 l + a2 ctx + a3 l ctx)) + latency + seconds_per_token_sent b l

`l` tokens of each of `b` sequences attend to themselves and to the `ctx` tokens before them. `base` is measured, and
interpolated between the measured lengths; the context part is fitted by least squares (`fit`). The last two are the
message to the next rank, during which the paper counts both ranks as busy.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import InputError
from pipeloom.ir.json_text import load_json
from pipeloom.sim.costs import MOST

Array = NDArray[np.float64]


class SliceTime(Protocol):
    """Any callable ``(batch, length, context) -> (forward seconds, backward seconds)`` of one rank on one slice.

    It is called with numbers. One that has an attribute ``takes_arrays = True`` is called once with arrays of lengths
    and contexts instead, which is what makes thousands of tokens fast.
    """

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Any, Any]: ...


def ask(stage: SliceTime, batch: int, length: Any, context: Any) -> Array:
    """What a rank's costs say, forward and backward: shape (2,), or (2, slices) where it is asked with arrays.

    Raises:
        InputError: it says no pair of numbers.
    """
    answer: Any = stage(batch, length, context)
    try:
        forward, backward = answer
        if np.ndim(length) == 0:
            return np.array([float(forward), float(backward)])
        return np.array([np.broadcast_to(np.asarray(each, np.float64), np.shape(length)) for each in answer])
    except (TypeError, ValueError, OverflowError) as error:
        said = "too large" if isinstance(error, OverflowError) else " ".join(repr(answer).split())
        raise InputError(
            f"costs of a slice are {said if len(said) < 60 else said[:57] + '...'}: they are two numbers, seconds of "
            "its forward and of its backward; return both"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Seconds of one rank's share for one direction.

    Attributes:
        base: ``(tokens, seconds)`` without context, tokens ascending. Below the first it stays, beyond the last it
            rises as between the last two (from nothing, where there is one alone).
        context: a0, a1, a2, a3.
    """

    base: tuple[tuple[float, float], ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __call__(self, batch: int, length: Any, context: Any) -> Array:
        """Seconds of slices of `length` tokens of `batch` sequences, `context` tokens before each."""
        length, context = np.asarray(length, dtype=np.float64), np.asarray(context, dtype=np.float64)
        tokens, seconds = np.array([(0.0, 0.0), *self.base]).T
        asked = batch * length
        a0, a1, a2, a3 = self.context
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is used
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
            base = np.interp(asked, tokens[1:], seconds[1:]) + slope * np.maximum(asked - tokens[-1], 0.0)
            extra = a0 + batch * (a1 * length + a2 * context + a3 * length * context)
            return np.asarray(base + np.where(context > 0, extra, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCosts:
    """One rank's share of a model: forward, backward, and the message that follows either.

    Attributes:
        forward, backward: computing.
        latency: seconds of a message of no length.
        seconds_per_token_sent: what each of its tokens adds.
    """

    forward: LinearTime
    backward: LinearTime
    latency: float = 0.0
    seconds_per_token_sent: float = 0.0

    @property
    def takes_arrays(self) -> bool:
        return True

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Array, Array]:
        message = self.latency + self.seconds_per_token_sent * batch * np.asarray(length, dtype=np.float64)
        return self.forward(batch, length, context) + message, self.backward(batch, length, context) + message

    def to_json(self) -> str:
        """The text of a costs file; `parse_slice_costs` reads it back exactly."""
        phases = {name: {"base": getattr(self, name).base, "context": getattr(self, name).context} for name in _PHASES}
        return json.dumps({**phases, "latency": self.latency, "seconds_per_token_sent": self.seconds_per_token_sent})


class Sample(NamedTuple):
    """What was measured: `length` tokens behind `context` others took `seconds`; one sequence."""

    length: int
    context: int
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[LinearTime, float]:
    """The linear form of measurements, and how far it is from them.

    The base is the median of what was measured at each length without context. The context part is fitted to the rest
    by least squares. Both are of relative errors, for long slices would drown short ones otherwise; and both know that
    more tokens and more context take no time away: noise would say so else, and a form fitted to it would fall below 0
    between or beyond what was measured.

    Args:
        samples: measurements.

    Returns:
        The form, which is nowhere negative and never falls, and the root mean square of the relative error over the
        samples that it does not meet (0 if there are none).

    Raises:
        InputError: nothing was measured without context, or a time is not a positive number.
    """
    alone: dict[int, list[float]] = defaultdict(list)
    for length, context, seconds in samples:
        if not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"a slice of {length} tokens took {seconds} s: a time is more than 0; measure it again")
        if context == 0:
            alone[length].append(seconds)
    if not alone:
        raise InputError("no slice was measured without context: the base of the cost needs some; add lengths")
    lengths = sorted(alone)
    base = _rising([median(alone[length]) for length in lengths])
    fitted = LinearTime(base=tuple((float(length), time) for length, time in zip(lengths, base, strict=True)))
    length, context, seconds = np.array(samples, dtype=np.float64).T
    behind = context > 0
    if behind.any():
        terms = np.stack([np.ones_like(length), length, context, length * context], axis=1)[behind]
        scale = terms.max(axis=0)  # lengths squared beside ones: without it the fit loses digits
        wanted = 1 - fitted(1, length, 0)[behind] / seconds[behind]
        a0, a1, a2, a3 = (float(a) for a in _nonnegative(terms / scale / seconds[behind, None], wanted) / scale)
        fitted = LinearTime(base=fitted.base, context=(a0, a1, a2, a3))
    error = fitted(1, length, context) / seconds - 1
    missed = error[np.abs(error) > 1e-12]
    return fitted, float(np.sqrt(np.mean(missed**2))) if len(missed) else 0.0


def _rising(seconds: Sequence[float]) -> list[float]:
    """The nearest times, by relative error, that never fall; the same ones if they do not."""
    if all(a <= b for a, b in pairwise(seconds)):
        return list(seconds)
    steps = np.tril(np.ones((len(seconds), len(seconds))))  # every time is a sum of steps that are 0 or more
    times = np.array(seconds)
    return [float(time) for time in np.cumsum(_nonnegative(steps / times[:, None], np.ones_like(times)))]


def _nonnegative(matrix: Array, wanted: Array) -> Array:
    from scipy.optimize import nnls  # costs that are read from a file need no scipy

    return np.asarray(nnls(matrix, wanted, maxiter=100 * matrix.shape[1])[0])


# --- the file -------------------------------------------------------------------------------------------------------

_PHASES = ("forward", "backward")
_MESSAGE = ("latency", "seconds_per_token_sent")
_FORM = (
    '{"forward": {"base": [[tokens, seconds], ...], "context": [a0, a1, a2, a3]}, "backward": {...}, "latency": '
    'seconds, "seconds_per_token_sent": seconds}'
)


def parse_slice_costs(text: str) -> SliceCosts:
    """Read the JSON of a costs file; `context`, `latency` and `seconds_per_token_sent` are 0 where left out.

    Raises:
        InputError: it is not one; the message names the key and the rule.
    """
    try:
        data = load_json(text)
    except ValueError as error:
        raise InputError(f"costs of slices are no JSON ({error}): write {_FORM}") from error
    if not isinstance(data, Mapping):
        raise InputError(f"costs of slices are no object: write {_FORM}")
    _check_keys("costs of slices", data, required=_PHASES, optional=_MESSAGE)
    forward, backward = (_phase(name, data[name]) for name in _PHASES)
    latency, per_token = (_number(name, data.get(name, 0.0)) for name in _MESSAGE)
    return SliceCosts(forward=forward, backward=backward, latency=latency, seconds_per_token_sent=per_token)


def _phase(name: str, data: Any) -> LinearTime:
    if not isinstance(data, Mapping):
        raise InputError(f"{name} is no object: it has the keys base and context; write {_FORM}")
    _check_keys(name, data, required=("base",), optional=("context",))
    base, context = data["base"], data.get("context", [0.0] * 4)
    if not isinstance(base, list) or not base or any(not isinstance(p, list) or len(p) != 2 for p in base):
        raise InputError(f"{name}.base is no list of [tokens, seconds]: give at least one such pair")
    points = tuple((_number(f"{name}.base tokens", t), _number(f"{name}.base seconds", s)) for t, s in base)
    if points[0][0] <= 0 or any(b[0] <= a[0] for a, b in pairwise(points)):
        raise InputError(f"{name}.base has tokens {[t for t, _ in points]}: they are above 0 and ascend; sort them")
    if not isinstance(context, list) or len(context) != 4:
        raise InputError(f"{name}.context is {context!r}: it is the list [a0, a1, a2, a3]; give four numbers")
    a0, a1, a2, a3 = (_number(f"{name}.context a{i}", a, low=-math.inf) for i, a in enumerate(context))
    return LinearTime(base=points, context=(a0, a1, a2, a3))


def _check_keys(what: str, data: Mapping[str, Any], *, required: Sequence[str], optional: Sequence[str]) -> None:
    missing = [key for key in required if key not in data]
    if missing:
        raise InputError(f"{what} lacks the key {missing[0]!r}: {', '.join(required)} must be there; add it")
    unknown = sorted(set(data) - {*required, *optional})
    if unknown:
        raise InputError(f"{what} has a key {unknown[0]!r}: the keys are {', '.join((*required, *optional))}; drop it")


def _number(what: str, value: Any, low: float = 0.0) -> float:
    wanted = ("a number" if low < 0 else "a number, 0 or more") + f", of at most {MOST:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value or not abs(value) <= MOST:
        raise InputError(f"{what} of the costs of slices is {value!r}: it is {wanted}; correct it")
    return float(value)
