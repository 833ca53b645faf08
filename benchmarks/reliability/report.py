"""Tables of the results: a row per fault and system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common.report import Parts, table
from benchmarks.reliability.faults import DAMAGE, KINDS

COLUMNS = ("system", "runs", "first line by", "after", "names it", "ended", "resumed", "next step", "steps again",
           "result", "left")  # fmt: skip
RESUMED = {
    "itself": "by itself",
    "hand": "by hand",
    "removed": "by hand, checkpoint removed",
    "never": "never",
}


def parts(runs: Sequence[dict[str, Any]]) -> Parts:
    """A heading and a table per kind of fault, with all runs of each system in one row."""
    found: list[Any] = []
    for kind, text in KINDS.items():
        of_kind = [run for run in runs if run["kind"] == kind]
        if of_kind:
            names = sorted({run["system"] for run in of_kind}, key=lambda name: ("DCP" not in name, name))
            rows = [_row(name, [run for run in of_kind if run["system"] == name]) for name in names]
            found += [f"### {text[0].upper()}{text[1:]}", table(COLUMNS, rows)]
    if bits := [run for run in runs if run["kind"] == "bits"]:
        columns = ("system", "bits", "error", "other values, no error", "no effect")
        rows = [tuple(run[key] for key in ("system", "bits", "raised", "silent", "same")) for run in bits]
        found += ["### Single bits of one checkpoint, which is then read", table(columns, rows)]
    return found


def _row(name: str, runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return (
        name,
        str(len(runs)),
        _counted(run["told_by"] or "none" for run in runs),
        _seconds(run["told_seconds"] for run in runs),
        "" if runs[0]["kind"] in ("preempt", "agent-kill") else _seconds(run["named_seconds"] for run in runs),
        _ended(runs),
        _counted(RESUMED[run["resumed"]] for run in runs),
        _seconds(run["again_seconds"] for run in runs if run["resumed"] == "itself"),
        _range([run["steps_again"] for run in runs if run["again_seconds"] is not None], "{}"),
        _counted(map(result, runs)),
        _counted(_left(run["left"]) for run in runs),
    )


def result(run: dict[str, Any]) -> str:
    """How a run came out."""
    if run["difference"] is None:
        return "not completed"
    if not run["difference"]:
        return "bitwise"
    told = run["told_seconds"] is not None or run["kind"] not in DAMAGE
    return "different" if told else "silently different"


def _ended(runs: Sequence[dict[str, Any]]) -> str:
    if any(name.startswith("process ") for run in runs for name in run["left"]):
        return "not in 5 s"
    return _seconds(run["ended_seconds"] for run in runs) + (" (cap)" if any(run["given_up"] for run in runs) else "")


def _left(names: Sequence[str]) -> str:
    processes = sum(name.startswith("process ") for name in names)
    others = len(names) - processes
    words = [f"{processes} processes"] * bool(processes) + [f"{others} names in `/dev/shm`"] * bool(others)
    return re.sub(r"\b(1 \w+?)(es|s)\b", r"\1", ", ".join(words)) or "nothing"


def _counted(words: Iterable[str]) -> str:
    """Each word with its count, unless there is one."""
    counts = Counter(words)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{word} ({n})" for word, n in counts.items())


def _seconds(values: Iterable[float | None]) -> str:
    return _range([value for value in values if value is not None], "{:.1f}", " s")


def _range(values: Sequence[float], pattern: str, unit: str = "") -> str:
    if not values:
        return "-"
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return (low if low == high else f"{low}-{high}") + unit
