"""Markdown tables and JSON results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table: first column to the left, the others to the right, padded to be read as text too."""
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths))) + " |"  # noqa: B905
        for row in cells
    ]
    rules = ["-" * (w + 2) if k == 0 else "-" * (w + 1) + ":" for k, w in enumerate(widths)]
    lines.insert(1, "|" + "|".join(rules) + "|")
    return "\n".join(lines)


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
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
    }


def save(path: Path, settings: dict[str, Any], machine: dict[str, Any], results: Any, tables: str) -> None:
    """Write `path` (JSON, with everything measured) and the tables beside it as markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {"environment": machine, "settings": settings, "results": results}
    path.write_text(json.dumps(payload, indent=1, default=str) + "\n")
    path.with_suffix(".md").write_text(tables + "\n")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
