"""A pytest plugin that logs how each test ends, names it to coverage, and runs chosen tests in a chosen order."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

LOG = "MUTANTS_LOG"  # variable with a file to which every phase of every test is written
CHOSEN = "MUTANTS_TESTS"  # variable with a file of the tests to run: test id -> longest seconds, in order
_MEMORY = 16 << 30  # bytes of address space of a process: a mutant may fill a list without end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if file := os.environ.get(CHOSEN):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        chosen = json.loads(Path(file).read_text(encoding="utf-8"))
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test] for test in chosen if test in by_id]
        for item in items:
            item.add_marker(pytest.mark.timeout(chosen[item.nodeid]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(item.nodeid)
    result = yield
    if running is not None:
        running.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers sees all reports
        return
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": message[:500]}
    with open(os.environ[LOG], "a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
