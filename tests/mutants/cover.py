"""Which test files execute which lines: one run of every test file under coverage, child processes included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

_CONFIG = """
[run]
data_file = {data}
parallel = true
source = pipeloom
patch = subprocess, _exit
"""


def measure(root: Path, workers: int) -> dict[str, tuple[float, dict[str, list[int]]]]:
    """For each test file, relative to `root`: its seconds, and the lines it executes by source file."""
    files = sorted(path.relative_to(root).as_posix() for path in (root / "tests").glob("*/test_*.py"))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(files, pool.map(lambda file: _measure(root, file), files), strict=True))


def _measure(root: Path, file: str) -> tuple[float, dict[str, list[int]]]:
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "coveragerc"
        config.write_text(_CONFIG.format(data=Path(scratch) / "data"), encoding="utf-8")
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-x", file],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            capture_output=True,
            check=False,
        )
        seconds = time.monotonic() - start
        combined = coverage.Coverage(data_file=str(Path(scratch) / "all"), config_file=False)
        combined.combine([scratch], strict=False)
        data = combined.get_data()
        lines: dict[str, list[int]] = {}
        for name in data.measured_files():
            path = Path(name)
            if path.is_relative_to(root):
                lines[path.relative_to(root).as_posix()] = sorted(data.lines(name) or ())
        return seconds, lines


def cached(root: Path, cache: Path, workers: int) -> dict[str, tuple[float, dict[str, list[int]]]]:
    """`measure`, kept in a file for the commit that it was measured of."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    if cache.is_file():
        kept = json.loads(cache.read_text(encoding="utf-8"))
        if kept["commit"] == commit:
            return {file: (seconds, lines) for file, (seconds, lines) in kept["files"].items()}
    files = measure(root, workers)
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({"commit": commit, "files": files}), encoding="utf-8")
    return files
