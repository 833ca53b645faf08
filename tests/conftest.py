"""What holds for every test: the same conditions wherever and in whatever order they run, no process left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Two cores run several tests and their ranks at once; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a terminal, a launcher or a user's habits would change in what is printed, and in what a command makes of itself.
_MISLEADING = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE")
for _name in list(os.environ):
    if _name in _MISLEADING or _name.startswith(("PIPELOOM_", "TORCHELASTIC_")):
        del os.environ[_name]

# Hundreds of processes import what is tested: they read its bytecode instead of compiling all of it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# On a busy machine anything may be slow, which says nothing about what is tested. The examples are the same in every
# run, so that what fails once fails again.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("steady")

# Under nohup, or with `&` in a script, these are ignored from the start, and what a test starts inherits it.
for _number, _default in {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTTOU: signal.SIG_DFL,
}.items():
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

# `make check` runs tests/pure, but for what takes longest there, and these of tests/cpu: gradients against one process,
# messages between processes, the mesh, and splitting.
_NOT_QUICK = {"test_plan_grid.py", "test_rules.py", "test_slicing.py", "test_zb_auto.py"}
_QUICK_CPU = {"test_gradients.py", "test_mesh.py", "test_split.py", "test_transports.py"}

_PROC = Path("/proc")
_MARK = f"_PIPELOOM_TEST={os.getpid()}"  # in the environment of everything that this process starts
os.environ["_PIPELOOM_TEST"] = str(os.getpid())
_END_SECONDS = 30.0  # what was told to end may take a while on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder, name = item.path.parent.name, item.path.name
        if (folder == "pure" and name not in _NOT_QUICK) or (folder == "cpu" and name in _QUICK_CPU):
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Collections look through what tests make, not through all modules; forks share the pages of these for longer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """A test that leaves a handler behind does not end the process at a later test's interrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            warnings.warn(f"a test left the handler {signal.getsignal(number)} of {number.name}", stacklevel=1)
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Which tests ran before in this process changes no test's numbers."""
    random.seed(0)
    if "numpy" in sys.modules:  # what no test has loaded, none draws from
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def new_objects_alone() -> None:
    """`gc.get_objects` and `gc.collect` look through what the test makes, not through all that is loaded."""
    gc.collect()
    gc.freeze()


def _process_ids() -> set[int]:
    return {int(name) for name in os.listdir(_PROC) if name.isdecimal()} if _PROC.is_dir() else set()


def _left_behind(before: set[int]) -> dict[int, str]:
    """Processes that descend from this one, also orphaned ones, and were not there `before`: id -> command line."""
    found = {}
    for process in _process_ids() - before:
        with suppress(OSError):
            if _MARK.encode() not in (_PROC / str(process) / "environ").read_bytes().split(b"\0"):
                continue
            command = (_PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command and "multiprocessing.resource_tracker" not in command:  # a zombie has no command line
                found[process] = command.strip()
    return found


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes behind, and end them."""
    before = _process_ids()
    yield
    deadline = time.monotonic() + _END_SECONDS
    while (left := _left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert not left, f"the test left processes behind: {left}"
