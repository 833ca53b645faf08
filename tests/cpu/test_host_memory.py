"""Memory that a rank frees is there for its next micro-batch without a page fault, or goes back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeloom.processes.host_memory import keep_freed_memory

# Before there are any holes in the heap, which would be filled.
SCRIPT = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: of huge pages there would be few
from pipeloom.processes.host_memory import give_back_freed_memory, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [torch.ones(size, dtype=torch.uint8) for size in [20 << 20] * 4]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert give_back_freed_memory() and give_back_freed_memory()
goes_back = faults()
assert keep_freed_memory() and keep_freed_memory()
faults()
print(goes_back, faults())
"""


def test_freed_memory_goes_back_or_stays() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library has no mallopt")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    goes_back, stays = map(int, done.stdout.split())
    assert goes_back > 10 * 4 * (20 << 20) // 4096 // 2, "every block is mapped anew"
    assert stays < (20 << 20) // 4096 // 10, "not even a tenth of one tensor is faulted in again"
