"""At the end of a process nothing that needs the interpreter is at work any more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable

import pytest

from pipeloom.processes import collectives


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_a_thread_at_work_is_seen_and_one_that_sleeps_is_not() -> None:
    data, ended = os.urandom(1 << 22), threading.Event()

    def work() -> None:
        while not ended.is_set():
            zlib.compress(data)  # without the interpreter

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert eventually(collectives._others_work)
    finally:
        ended.set()
        thread.join()
    assert eventually(lambda: not collectives._others_work())


@pytest.mark.parametrize(
    ("at_work", "num_looks"), [([False], 2), ([True, True, False], 4), ([False, True, False], 4), ([True] * 1000, None)]
)
def test_threads_are_waited_for_until_they_sleep_or_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch, at_work: list[bool], num_looks: int | None
) -> None:
    now, looks = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def look() -> bool:
        nonlocal looks
        looks += 1
        return at_work[min(looks, len(at_work)) - 1]

    monkeypatch.setattr(collectives, "_others_work", look)
    monkeypatch.setattr(collectives.time, "sleep", sleep)
    monkeypatch.setattr(collectives.time, "monotonic", lambda: now)
    collectives._wait_for_threads()
    assert looks == num_looks or (num_looks is None and now == pytest.approx(collectives._MOST_SECONDS, abs=0.1))


def test_it_is_what_comes_last() -> None:
    """Whatever else is registered to be called at the end uses gloo perhaps."""
    words = (
        "import atexit; from pipeloom.processes import collectives as g;"
        "g._wait_for_threads = lambda: print('waits');"
        "g.let_gloo_finish(); atexit.register(print, 'closes'); g.let_gloo_finish()"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["closes", "waits"]
