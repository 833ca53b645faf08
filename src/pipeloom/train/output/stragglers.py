"""`StragglerWatch`: ranks that compute slower than before, or than the ranks of other replicas with their stages."""

import statistics
from collections import deque
from collections.abc import Sequence

KINDS = ("forwards", "backwards")
_WINDOW = 12  # steps that are compared with history
_HISTORY = 60  # steps before them
_LEAST_HISTORY = 10
_LEAST_EXCESS = 0.3  # of a factor over 1
_MADS = 6.0  # the excess is also above this many median absolute deviations of the history
_ENDED = 0.5  # of the excess: below it the rank is no straggler any more
_CHANGED = 1.4  # ratio of two factors that are told apart
_LEAST_DATA_SHARE = 0.15


class StragglerWatch:
    """Says which ranks have become slower at forwards or backwards, and which wait for their samples.

    Args:
        num_ranks: per replica. Processes are listed replica after replica, the ranks of each in order.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = num_ranks
        self._kinds = [_KindTimes(num_ranks) for _ in KINDS]
        self._data: deque[list[tuple[float, float]]] = deque(maxlen=_WINDOW)  # factor and share of each process
        self._waiting: dict[int, tuple[float, float]] = {}  # their medians, of processes that wait for samples

    def observe(
        self, seconds: Sequence[Sequence[float]], data: Sequence[float], step_seconds: float
    ) -> dict[tuple[int, str], str]:
        """Take one step; a line about each change, by process and what changed.

        Args:
            seconds: of forwards and of backwards, per process.
            data: seconds that each process waited for its samples.
            step_seconds: of the whole step.
        """
        lines = {}
        for kind, times, found in zip(KINDS, self._kinds, seconds, strict=True):
            for place, words in times.observe(found, step_seconds):
                lines[place, kind] = f"{self._name(place, len(data))} computes {kind} {words}"
        computing = [max(sum(each), 1e-9) for each in zip(*seconds, strict=True)]
        self._data.append([(1 + wait / own, wait / step_seconds) for wait, own in zip(data, computing, strict=True)])
        for place in range(len(data)) if len(self._data) == _WINDOW else ():
            if (words_of_data := self._judge_data(place)) is not None:
                lines[place, "data"] = f"{self._name(place, len(data))} {words_of_data}"
        return lines

    def slow(self) -> list[dict[str, float | int | str]]:
        """The stragglers of now: replica, rank, kind, factor, and share of the step of each."""
        return [
            {**self._place(place), "kind": name, "factor": factor, "share": share}
            for name, times in zip(KINDS, self._kinds, strict=True)
            for place, (factor, share) in sorted(times.slow.items())
        ]

    def waiting(self) -> list[dict[str, float | int]]:
        """The processes that wait for their samples now: replica, rank, factor, and share of the step of each.

        The factor is the time of computing and waiting over that of computing.
        """
        return [
            {**self._place(place), "factor": factor, "share": share}
            for place, (factor, share) in sorted(self._waiting.items())
        ]

    def _place(self, place: int) -> dict[str, int]:
        return {"replica": place // self._ranks, "rank": place % self._ranks}

    def _name(self, place: int, num_processes: int) -> str:
        rank = f"rank {place % self._ranks}"
        return f"{rank} of replica {place // self._ranks}" if num_processes > self._ranks else rank

    def _judge_data(self, place: int) -> str | None:
        factors, shares = (sorted(each) for each in zip(*(step[place] for step in self._data), strict=True))
        factor, share = statistics.median(factors), min(statistics.median(shares), 1.0)
        if place in self._waiting:
            if share < _ENDED * _LEAST_DATA_SHARE:
                del self._waiting[place]
                return "no longer waits for its samples"
            self._waiting[place] = factor, share
        elif shares[len(shares) // 4] > _LEAST_DATA_SHARE:
            self._waiting[place] = factor, share
            return (
                f"waits for its samples during {share:.0%} of the step; computing and waiting take {factor:.1f} times "
                "as long as computing"
            )
        return None


class _KindTimes:
    """The times of one kind of computation on every process.

    A process's factor over its history is its growth over the median of earlier steps, divided by the growth of the
    process that grew least in the same step: a machine that is loaded as a whole has no straggler. Its factor over its
    equals is the ratio to the median of the other replicas with the same stages. The lower quartile of the last 12
    steps decides whether it is a straggler; the median is its factor. Its share is the median, over these steps, of
    the time that it computed longer for this factor, as a fraction of the step: at most that is lost.

    Attributes:
        slow: by process, factor and share of stragglers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = num_ranks
        self._steps: deque[list[float]] = deque(maxlen=_HISTORY + _WINDOW)
        self._shares: deque[list[float]] = deque(maxlen=_WINDOW)  # of the step, that each process computed
        self._base: dict[int, tuple[list[float], float]] = {}  # of stragglers: their history when they became ones
        self._told: dict[int, float] = {}  # the factor in the last line about each straggler
        self.slow: dict[int, tuple[float, float]] = {}

    def observe(self, seconds: Sequence[float], step_seconds: float) -> list[tuple[int, str]]:
        """Take the seconds of every process in one step; the processes that changed, and how."""
        self._steps.append([max(each, 1e-9) for each in seconds])
        self._shares.append([each / step_seconds for each in seconds])
        if len(self._steps) < _WINDOW:
            return []
        recent, history = list(self._steps)[-_WINDOW:], self._history()
        places = range(len(seconds))
        found = [(place, self._judge(place, recent, history)) for place in places]
        return [(place, words) for place, words in found if words is not None]

    def _judge(self, place: int, recent: list[list[float]], history: tuple[list[float], float]) -> str | None:
        base, noise = self._base.get(place, history)
        compared = [
            (_over_history(place, recent, base), "than in earlier steps", max(_LEAST_EXCESS, _MADS * noise)),
            (_over_equals(place, recent, self._ranks), "than other replicas", _LEAST_EXCESS),
        ]
        ratios, words, least = max(compared, key=lambda each: each[0][_WINDOW // 4] - each[2])
        quartile, factor = ratios[_WINDOW // 4], statistics.median(ratios)
        known = place in self.slow
        if not known and quartile < 1 + least:
            return None
        if known and quartile < 1 + _ENDED * _LEAST_EXCESS:
            del self.slow[place], self._base[place], self._told[place]
            return "as fast as before"
        self._base.setdefault(place, history)
        share = min(1.0, statistics.median(step[place] for step in self._shares) * (1 - 1 / factor))
        self.slow[place] = factor, share
        if known and 1 / _CHANGED < factor / self._told[place] < _CHANGED:
            return None
        self._told[place] = factor
        return f"{factor:.1f} times slower {words}; this takes up to {share:.0%} of the step"

    def _history(self) -> tuple[list[float], float]:
        """Median times before the last steps, and the largest relative deviation; empty as long as there are few."""
        earlier = list(self._steps)[:-_WINDOW]
        if len(earlier) < _LEAST_HISTORY:
            return [], 0.0
        columns = list(zip(*earlier, strict=True))
        base = [statistics.median(column) for column in columns]
        deviations = (
            statistics.median(abs(value / middle - 1) for value in column)
            for column, middle in zip(columns, base, strict=True)
        )
        return base, max(deviations)


def _over_history(place: int, recent: list[list[float]], base: list[float]) -> list[float]:
    """The factors of a process over its history in recent steps, ascending; 0 without history."""
    if not base:
        return [0.0] * len(recent)
    growths = [[value / before for value, before in zip(step, base, strict=True)] for step in recent]
    others = [each for each in range(len(base)) if each != place]
    return sorted(row[place] / max(1.0, min((row[each] for each in others), default=1.0)) for row in growths)


def _over_equals(place: int, recent: list[list[float]], num_ranks: int) -> list[float]:
    """The ratios of a process to the median of its equals in recent steps, ascending; 0 without equals."""
    equals = [each for each in range(place % num_ranks, len(recent[0]), num_ranks) if each != place]
    if not equals:
        return [0.0] * len(recent)
    return sorted(step[place] / statistics.median(step[each] for each in equals) for step in recent)
