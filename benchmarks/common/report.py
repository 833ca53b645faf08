"""Results of a benchmark: tables for the terminal, and one JSON file for the generated pages.

The JSON of every benchmark has the same keys: `format`, `benchmark`, `version` (of pipeloom), `command`, `source`,
`environment` (machine and package versions), `settings`, `headlines` (name -> median and quartiles), `parts` (the
paragraphs and tables that `python -m benchmarks.tables` renders) and `results` (everything measured).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.statistics import Cell, Spread
from pipeloom.version import __version__

FORMAT = "pipeloom-benchmark-1"
MEASURED = "measured"  # the source of a file that a benchmark wrote itself


@dataclass(frozen=True)
class Table:
    """A table whose cells are strings, numbers, or medians with quartiles (`Cell`)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def __str__(self) -> str:
        """Markdown, padded so that it reads well as text too; the first column is left-aligned, the others right."""
        cells = [list(self.columns), *(list(map(str, row)) for row in self.rows)]
        widths = [max(len(row[k]) for row in cells) for k in range(len(self.columns))]
        lines = [
            "| " + " | ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths))) + " |"  # noqa: B905
            for row in cells
        ]
        rules = ["-" * (w + 2) if k == 0 else "-" * (w + 1) + ":" for k, w in enumerate(widths)]
        lines.insert(1, "|" + "|".join(rules) + "|")
        return "\n".join(lines)


Parts = Sequence[str | Table]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A `Table` of `rows`, each with one cell per entry of `header`."""
    return Table(tuple(header), tuple(map(tuple, rows)))


def markdown(parts: Parts) -> str:
    """Paragraphs and tables, with an empty line between them."""
    return "\n\n".join(map(str, parts))


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers: machine and versions."""
    versions = {}
    for package in ("torch", "deepspeed", "numpy", "scipy", "ortools"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    commit = ""
    if shutil.which("git"):
        asked = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.strip() or None,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
    }


def save(
    path: Path,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Any,
    parts: Parts,
    headlines: Mapping[str, Spread] | None = None,
) -> None:
    """Write the JSON file of a benchmark.

    Args:
        path: of the file.
        settings: rounds and the like.
        machine: see `environment`.
        results: everything measured.
        parts: paragraphs and tables for the generated page.
        headlines: ratios for the table of the README, by the names that `benchmarks.tables.HEADLINES` looks up.
    """
    words = sys.modules["__main__"].__spec__
    module = words.name.removesuffix(".__main__") if words is not None else "benchmarks"
    payload = {
        "format": FORMAT,
        "benchmark": module.split(".")[-1],
        "version": __version__,
        "source": MEASURED,
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "environment": machine,
        "settings": settings,
        "headlines": {name: value._asdict() for name, value in (headlines or {}).items()},
        "parts": parts_to_json(parts),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1, default=str) + "\n", encoding="utf-8")


def parts_to_json(parts: Parts) -> list[Any]:
    """Paragraphs as strings, tables as objects with `columns` and `rows`; a `Cell` keeps its median and quartiles."""

    def cell(value: object) -> object:
        if isinstance(value, Cell):
            return {"text": value.text, **value.spread._asdict()}
        return value if isinstance(value, int | float) else str(value)

    return [
        {"columns": part.columns, "rows": [[cell(value) for value in row] for row in part.rows]}
        if isinstance(part, Table)
        else part
        for part in parts
    ]


def parts_from_json(parts: Sequence[Any]) -> list[str | Table]:
    """The inverse of `parts_to_json`, with the text of each cell."""

    def text(cell: Any) -> str:
        return str(cell["text"] if isinstance(cell, dict) else cell)

    return [
        part
        if isinstance(part, str)
        else table(part["columns"], [[text(cell) for cell in row] for row in part["rows"]])
        for part in parts
    ]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
