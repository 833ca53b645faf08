"""What a run report shows of slow ranks, slow links, waits for samples, spikes and faults, from the rows of steps.

    "stragglers":   [{"replica": 0, "rank": 1, "kind": "forwards", "factor": 2.1, "share": 0.17}]
    "sample_waits": [{"replica": 0, "rank": 0, "factor": 2.0, "share": 0.3}]
    "slow_links":   [{"source": 1, "target": 2, "factor": 6.3, "share": 0.23}]
    "spike": "loss 9.1, limit 5.2", "hardware_fault": "loss nan and ..."

`share` is the part of the step that is lost, from 0 to 1. Rows of older versions have none for stragglers.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeloom.common.quantities import percent_text
from pipeloom.report.run_files import Rewind, as_number

MOST_FINDINGS = 50
_EVENTS = (("spike", "loss spike"), ("hardware_fault", "hardware fault"))

Entry = Mapping[str, Any]


class Shown(NamedTuple):
    """Rows of text by column, and the number of rows that are left out."""

    rows: list[dict[str, str]]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Finding:
    """One finding in steps that follow each other.

    Attributes:
        kind: ``computing: forwards``, ``samples`` or ``link``.
        place: who is slow.
        steps: of the rows that have it.
        factors, shares: of each step; NaN: not recorded.
    """

    kind: str
    place: str
    steps: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @property
    def lost_steps(self) -> float:
        """The time lost, in steps; of a finding without shares, their number."""
        return _median(self.shares, 1.0) * len(self.steps)


def slow_findings(steps: Sequence[Entry], *, replicas: bool) -> Shown:
    """What was slow, in the order of first steps: `steps`, `kind`, `place`, `factor` and `share` of each finding.

    A finding lasts as long as every row has it. The `MOST_FINDINGS` that cost most time are kept.

    Args:
        steps: the rows of ``metrics.jsonl``, ascending by step.
        replicas: whether the names of ranks have their replica.
    """
    ended: list[_Finding] = []
    lasting: dict[tuple[str, str], _Finding] = {}
    for row in steps:
        before, lasting = lasting, {}
        for kind, place, entry in _entries(row, replicas):
            key = kind, place
            if key not in lasting:
                lasting[key] = before.pop(key) if key in before else _Finding(kind, place)
            found = lasting[key]
            found.steps.append(int(row["step"]))
            found.factors.append(as_number(entry.get("factor")))
            found.shares.append(as_number(entry.get("share")))
        ended += before.values()
    everything = [*ended, *lasting.values()]
    kept = sorted(everything, key=lambda each: each.lost_steps, reverse=True)[:MOST_FINDINGS]
    last = int(steps[-1]["step"]) if steps else 0
    rows = [
        {
            "steps": _steps_text(found.steps[0], found.steps[-1], last),
            "kind": found.kind,
            "place": found.place,
            "factor": _text(found.factors, lambda factor: f"{factor:.1f}"),
            "share": _text(found.shares, percent_text),
        }
        for found in sorted(kept, key=lambda each: (each.steps[0], each.kind, each.place))
    ]
    return Shown(rows, len(everything) - len(kept))


def events(steps: Sequence[Entry], rewinds: Sequence[Rewind]) -> Shown:
    """Spikes, rewinds and hardware faults in the order of steps: `step`, `kind` and `words` of each.

    The last `MOST_FINDINGS` are kept.

    Args:
        steps: the rows of ``metrics.jsonl``, ascending by step. A rewind removes those after its checkpoint.
        rewinds: of the run.
    """
    found = [
        (int(row["step"]), kind, str(row[key]))
        for row in steps
        for key, kind in _EVENTS
        if isinstance(row.get(key), str)
    ]
    found += [
        (rewind.step, "loss spike, rewind", f"{rewind.spike}; back to step {rewind.checkpoint}") for rewind in rewinds
    ]
    found.sort(key=lambda each: each[0])
    rows = [{"step": str(step), "kind": kind, "words": words} for step, kind, words in found[-MOST_FINDINGS:]]
    return Shown(rows, len(found) - len(rows))


def _entries(row: Entry, replicas: bool) -> list[tuple[str, str, Entry]]:
    """Kind and place of each slow rank and link of a step, and its entry; what has another form is left out."""
    found = [(f"computing: {entry.get('kind')}", _rank(entry, replicas), entry) for entry in _dicts(row, "stragglers")]
    found += [("samples", _rank(entry, replicas), entry) for entry in _dicts(row, "sample_waits")]
    found += [
        ("link", f"rank {entry.get('source')} to rank {entry.get('target')}", entry)
        for entry in _dicts(row, "slow_links")
    ]
    return found


def _dicts(row: Entry, key: str) -> list[Entry]:
    found = row.get(key)
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _rank(entry: Entry, replicas: bool) -> str:
    return f"rank {entry.get('rank')}" + (f" of replica {entry.get('replica')}" if replicas else "")


def _steps_text(first: int, last: int, newest: int) -> str:
    text = str(first) if first == last else f"{first} to {last}"
    return f"{text}, the last step" if last == newest else text


def _median(values: Sequence[float], default: float) -> float:
    return statistics.median([value for value in values if math.isfinite(value)] or [default])


def _text(values: Sequence[float], words: Callable[[float], str]) -> str:
    middle = _median(values, math.nan)
    return words(middle) if math.isfinite(middle) else "not recorded"
