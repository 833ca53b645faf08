"""Memory that a rank frees is there for its next micro-batch without a page fault, or goes back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeloom.processes.host_memory import give_back_freed_memory, keep_freed_memory

SCRIPT = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: of huge pages there would be few
from pipeloom.processes.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [torch.ones(size, dtype=torch.uint8) for size in [20 << 20] * 4]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = faults()
assert keep_freed_memory() and keep_freed_memory()
faults()
print(before, faults())
"""


def test_freed_memory_stays() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library has no mallopt")
    # The threshold of malloc moves with what was freed before, which a fixed one does not.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    before, after = map(int, done.stdout.split())
    assert before > 10 * (20 << 20) // 4096, "without it, at least one tensor's pages are faulted in again each time"
    assert after < (20 << 20) // 4096 // 10, "not even a tenth of one tensor is faulted in again"


def test_freed_memory_goes_back() -> None:
    if not give_back_freed_memory():
        pytest.skip("the C library has no mallopt")
    # Before there are any holes in the heap, which would be filled.
    script = SCRIPT.replace("keep_freed_memory", "give_back_freed_memory").replace(
        "\nfaults()\nbefore = faults()", "\nbefore = 0"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    _, after = map(int, done.stdout.split())
    assert after > 10 * 4 * (20 << 20) // 4096 // 2, "every block is mapped anew"
