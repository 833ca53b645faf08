"""Memory that a rank frees is there for its next micro-batch without a page fault, or goes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.runtime.host_memory import give_back_freed_memory, keep_freed_memory

SCRIPT = """
import resource, sys, torch
from pipeloom.runtime.host_memory import keep_freed_memory

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
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    before, after = map(int, done.stdout.split())
    assert before > 10 * (20 << 20) // 4096, "without it, at least one tensor's pages are faulted in again each time"
    assert after < 50


def test_freed_memory_goes_back() -> None:
    if not give_back_freed_memory():
        pytest.skip("the C library has no mallopt")
    # Before there are any holes in the heap, which would be filled.
    script = SCRIPT.replace("keep_freed_memory", "give_back_freed_memory").replace(
        "\nfaults()\nbefore = faults()", "\nbefore = 0"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    _, after = map(int, done.stdout.split())
    assert after > 10 * 4 * (20 << 20) // 4096 // 2, "every block is mapped anew"


HUGE = """
from pathlib import Path
import torch
from pipeloom.runtime.host_memory import HugeHeap, keep_freed_memory

def flags():
    "Whether huge pages are asked for, in each mapping of the heap."
    found, heap = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line and "-" in line.split(" ", 1)[0]:
            heap = line.endswith("[heap]")
        elif heap and line.startswith("VmFlags:"):
            found.append("hg" in line.split())
    return found

keep_freed_memory()
before = flags()
heap = HugeHeap()
made = flags()
held = [torch.empty(20 << 20, dtype=torch.uint8) for _ in range(60)]  # more than it is ahead; nothing touches the pages
grown = flags()
heap.follow()
print(any(before), all(made), all(grown), all(flags()))
"""


def test_a_kept_heap_asks_for_huge_pages_as_it_grows() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not keep_freed_memory() or not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no mallopt, or a kernel that has no huge pages")
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "False", "True"]
