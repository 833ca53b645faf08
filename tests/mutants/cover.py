"""Which tests execute which lines: one run of the suite under coverage, child processes included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import coverage

from tests.mutants.plugin import LOG

# A child process reads this file when it starts, and takes the test that started it from its environment.
_CONFIG = """
[run]
data_file = {folder}/lines
parallel = true
include = {tree}/src/*
patch = _exit
context = ${{PYTEST_CURRENT_TEST-}}
"""


class Cover:
    """The tests that execute a line.

    Attributes:
        seconds: of each test that passes on the unchanged code, under coverage.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
        self._data = coverage.CoverageData(str(folder / "lines"))
        self._data.read()
        self._files = {name.partition("/src/pipeloom/")[2]: name for name in self._data.measured_files()}

    def tests_of(self, path: str, lines: range) -> set[str]:
        """The tests that execute any of these lines; where imports do, those that execute any line of the file."""
        name = self._files.get(path.removeprefix("src/pipeloom/"))
        contexts = self._data.contexts_by_lineno(name) if name else {}
        found = {context for line in lines for context in contexts.get(line, ())}
        if "" in found:
            found.update(*contexts.values())
        return self.seconds.keys() & {_test_id(context) for context in found}


def choose(tests: set[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Tests worth `limit` seconds at most, the quickest of every file before the second of any; quickest first."""
    files = defaultdict(list)
    for test in sorted(tests, key=seconds.__getitem__):
        files[test.partition("::")[0]].append(test)
    by_turns = sorted((turn, seconds[test], test) for file in files.values() for turn, test in enumerate(file))
    chosen = []
    for _, needed, test in by_turns:
        if needed <= limit:
            limit -= needed
            chosen.append(test)
    return sorted(chosen, key=seconds.__getitem__)


def _test_id(context: str) -> str:
    """The test of a context: its id, with its phase in parentheses where a child process noted it."""
    name, _, phase = context.rpartition(" ")
    return name if phase in ("(setup)", "(call)", "(teardown)") else context


def recorded(tree: Path, folder: Path, workers: int) -> Cover:
    """The cover of the suite in `tree`, from `folder` where it is already there."""
    if not (folder / "seconds.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pipeloom-cover-") as scratch:
            _record(tree, folder, Path(scratch), workers)
    return Cover(folder)


def _record(tree: Path, folder: Path, scratch: Path, workers: int) -> None:
    config, log = scratch / "coveragerc", scratch / "log"
    config.write_text(_CONFIG.format(folder=scratch, tree=tree), encoding="utf-8")
    files = {"COVERAGE_PROCESS_START": str(config), LOG: str(log)}
    words = [sys.executable, "-m", "pytest", f"--numprocesses={workers}", "--dist=worksteal"]
    words += ["-p", "tests.mutants.plugin", "-p", "no:cacheprovider", f"--basetemp={scratch}/tests"]
    with (folder / "suite.txt").open("w", encoding="utf-8") as output:
        subprocess.run(
            words,
            cwd=tree,
            env={**os.environ, **files, "PYTHONPATH": f"{tree}/src:{tree}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    combined = coverage.Coverage(data_file=str(folder / "lines"), config_file=False)
    combined.combine([str(scratch)])
    combined.save()
    seconds: dict[str, float] = defaultdict(float)
    others = set()
    for line in log.read_text(encoding="utf-8").splitlines():
        report = json.loads(line)
        seconds[report["test"]] += report["seconds"]
        if report["outcome"] != "passed":
            others.add(report["test"])
    kept = {test: round(spent, 3) for test, spent in seconds.items() if test not in others}
    (folder / "seconds.json").write_text(json.dumps(kept, indent=0), encoding="utf-8")
