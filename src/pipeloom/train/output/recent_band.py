"""`RecentBand`: losses and gradient norms far above those of recent steps."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

_RECENT_STEPS = 32
_LEAST_STEPS = 20  # below it nothing is a spike: the first steps change fast
_DEVIATIONS = 8.0  # standard deviations above the median, estimated from the median absolute deviation
_LEAST_EXCESS = {"loss": 0.3, "gradient norm": 2.0}  # above the median, as fractions of it
_MAD_TO_DEVIATION = 1.4826  # for a normal distribution


class RecentBand:
    """The band of recent values of loss and gradient norm.

    A value is a spike if it is above the median of recent steps by 8 deviations and by a fraction of the median: 0.3
    for a loss, 2 for a norm. The deviation is 1.4826 times the median absolute deviation, so that earlier spikes do not
    widen the band. Every finite value enters the window: a lasting new level is accepted after half of it.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=_RECENT_STEPS) for name in _LEAST_EXCESS}

    def observe(self, loss: float, norm: float) -> str | None:
        """Take the finite values of a step; words such as ``loss 9.1, limit 5.2`` if one is above its limit."""
        found = []
        for (name, recent), value in zip(self._recent.items(), (loss, norm), strict=True):
            if len(recent) >= _LEAST_STEPS:
                middle = statistics.median(recent)
                deviation = _MAD_TO_DEVIATION * statistics.median(abs(each - middle) for each in recent)
                limit = middle + max(_DEVIATIONS * deviation, _LEAST_EXCESS[name] * abs(middle))
                if value > limit:
                    found.append(f"{name} {value:.4g}, limit {limit:.4g}")
            recent.append(value)
        return "; ".join(found) or None

    def state(self) -> dict[str, list[float]]:
        """The values of recent steps, for a checkpoint."""
        return {name: list(values) for name, values in self._recent.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state` returned."""
        self._recent = {name: deque(map(float, state[name]), maxlen=_RECENT_STEPS) for name in _LEAST_EXCESS}
