"""`LinkWatch`: messages between two ranks that take longer than before, in one direction, while ranks compute as fast.

What a link costs is the time that a receiver waits for a message after its sender began to send it:

    sender     F ───▶│ SEND │
    receiver      RECV ├────────────┤      waits for the sender's computation before, for the link from there on
                       begin of SEND
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from pipeloom.ir import Action
from pipeloom.ir.action import RECEIVES, SENDS

Link = tuple[int, int]  # source and target, ranks of a replica
Rows = Sequence[tuple[int, Sequence[tuple[Action, float, float]]]]

_HISTORY = 20  # steps
_LEAST_HISTORY = 5
_LEAST_FACTOR = 2.0
_LEAST_OVER_ALL = 1.5  # times the slowest earlier step
_LEAST_SHARE = 0.05  # of the step
_CONFIRMED = 3  # steps in a row
_ENDED_FACTOR = 1.5
_FLOOR_SECONDS = 1e-4  # per step; less counts as this
_OTHER_CLOCK_SECONDS = 1.0  # clocks that differ by more are those of two machines


class MachineClocks:
    """How far the clocks of two machines are apart, from the shortest messages of both directions.

    Messages of the step in which both together took least tell most, as in the network time protocol: one direction
    that becomes slower changes no clock. A delay of one direction that is there from the start counts half in each.
    """

    def __init__(self) -> None:
        self._seen: dict[Link, deque[tuple[float, float]]] = {}  # seconds there and back, seconds ahead

    def observe(self, shortest: Mapping[Link, float]) -> None:
        """Take, for each link, the least seconds from the begin of a send to the end of its receive, by both clocks."""
        for (source, target), seconds in shortest.items():
            back = shortest.get((target, source))
            if back is not None and source < target:
                found = self._seen.setdefault((source, target), deque(maxlen=_HISTORY))
                found.append((seconds + back, (seconds - back) / 2))

    def ahead(self, link: Link) -> float:
        """Seconds by which the target's clock is ahead of the source's; 0 on one machine."""
        found = self._seen.get((min(link), max(link)), ())
        ahead = min(found)[1] if found else 0.0
        return 0.0 if abs(ahead) <= _OTHER_CLOCK_SECONDS else ahead if link[0] < link[1] else -ahead


class LinkWatch:
    """Says which links have become slower than in earlier steps, and more so than the others.

    A link's time in a step is the sum over its messages, of which those that find their receiver busy cost nothing. Its
    factor is the growth over the median of earlier steps, divided by the growth of the link that grew least: on a
    machine that is loaded as a whole no link is slow.
    """

    def __init__(self) -> None:
        self._clocks = MachineClocks()
        self._history: dict[Link, deque[float]] = {}  # seconds per step
        self._counts: dict[Link, int] = {}  # steps in a row in which a link is slow
        self._slow: dict[Link, tuple[float, float]] = {}  # factor and share of those told

    @property
    def suspects(self) -> bool:
        """Whether a link was slow in the last step, but not in enough of them: the next step should be observed."""
        return any(link not in self._slow for link in self._counts)

    def slow(self) -> list[dict[str, float | int]]:
        """The slow links of now: source, target, factor, and share of the step."""
        return [
            {"source": source, "target": target, "factor": factor, "share": share}
            for (source, target), (factor, share) in sorted(self._slow.items())
        ]

    def observe(self, records: Rows) -> dict[Link, str]:
        """Take the records of all ranks in one step; a line about each link that changed."""
        times = {link: sum(found) for link, found in link_waits(records, self._clocks).items()}
        span = max((_last_end(rows) - min(start for _, start, _ in rows) for _, rows in records if rows), default=0.0)
        known = {link for link in times if len(self._history.get(link, ())) >= _LEAST_HISTORY}
        base = {link: statistics.median(self._history[link]) for link in known}
        growths = {link: max(times[link], _FLOOR_SECONDS) / max(base[link], _FLOOR_SECONDS) for link in known}
        lines = {}
        for link, seconds in times.items():
            factor = share = 0.0
            if link in known and span > 0:
                others = [growth for other, growth in growths.items() if other != link]
                factor = growths[link] / max(1.0, min(others, default=1.0))
                share = min(1.0, max(0.0, seconds - base[link]) / span)
                if link not in self._slow and seconds < _LEAST_OVER_ALL * max(self._history[link]):
                    factor = 1.0  # no more than what happens now and then
            if (words := self._judge(link, factor, share)) is not None:
                lines[link] = f"messages from rank {link[0]} to rank {link[1]} {words}"
            if link not in self._counts and link not in self._slow:
                self._history.setdefault(link, deque(maxlen=_HISTORY)).append(seconds)
        return lines

    def _judge(self, link: Link, factor: float, share: float) -> str | None:
        if factor >= _LEAST_FACTOR and share >= _LEAST_SHARE:
            self._counts[link] = self._counts.get(link, 0) + 1
        else:
            self._counts.pop(link, None)
        if link in self._slow:
            if factor < _ENDED_FACTOR or share < _LEAST_SHARE / 2:
                del self._slow[link]
                return "are as fast as before"
            self._slow[link] = factor, share
        elif self._counts.get(link, 0) >= _CONFIRMED:
            self._slow[link] = factor, share
            return (
                f"are {factor:.1f} times slower than in earlier steps; rank {link[1]} waits for them, once they are "
                f"sent, during up to {share:.0%} of the step"
            )
        return None


def link_waits(records: Rows, clocks: MachineClocks | None = None) -> dict[Link, list[float]]:
    """By link, the seconds that the receiver of each message waited after its sender began to send it.

    Args:
        records: of all ranks in one step.
        clocks: what earlier steps tell of the clocks; None: this step alone.
    """
    clocks = clocks or MachineClocks()
    sent = {action: (rank, start) for rank, rows in records for action, start, _ in rows if action.op in SENDS}
    messages: dict[Link, list[tuple[float, float, float]]] = {}
    for rank, rows in records:
        for action, start, end in rows:
            if action.op in RECEIVES and (other := sent.get(action.other_end())) is not None and other[0] != rank:
                messages.setdefault((other[0], rank), []).append((other[1], start, end))
    clocks.observe({link: min(end - begun for begun, _, end in found) for link, found in messages.items()})
    return {
        link: [max(0.0, end - max(begun + ahead, start)) for begun, start, end in found]
        for link, found in messages.items()
        for ahead in (clocks.ahead(link),)
    }


def _last_end(rows: Sequence[tuple[Action, float, float]]) -> float:
    return max(end for _, _, end in rows)
