"""What becomes of freed host memory: it stays in the process, as a caching allocator keeps it on a GPU, or goes back.

The C library gives the top of its heap back to the system whenever enough of it is free, and maps and unmaps large
blocks one by one. A training step frees the activations of every micro-batch it has finished, so the same pages are
given back and faulted in again all the time: thousands of page faults a step, 2 to 4 % of the time of a small GPT.

But a heap that is kept whole has holes. Parameters that are gathered for a moment, and gradients that are summed up
and freed, have many sizes: a process that held 435 MB of tensors at most had a heap of 784 MB. Where parameters are
freed to save memory, large blocks are mapped one by one after all.

A heap that is kept can lie in huge pages, of which the processor remembers where they are: small matrix products, each
of which reads other weights and writes other gradients, then wait less for address translation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# From malloc.h of glibc. Other C libraries do not know them, or have no mallopt at all.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no more; larger tensors are still mapped one by one
_NEVER_TRIM = 2**31 - 1  # mallopt takes an int
_TOP_PAD_BYTES = 16 << 20
_SMALL_BYTES = 4 << 20  # pages of smaller blocks would be faulted in too often
_MADV_HUGEPAGE = 14  # from mman.h of Linux
_AHEAD_BYTES = 512 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to its peak; False if the C library cannot."""
    return _set(
        {
            _M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD_BYTES,
            _M_TRIM_THRESHOLD: _NEVER_TRIM,
            _M_TOP_PAD: _TOP_PAD_BYTES,
        }
    )


class HugeHeap:
    """Huge pages for the heap of this process, if it keeps what it frees; does nothing where the system has none.

    The heap is what the C library calls so: blocks that are mapped one by one are not in it. Pages that were faulted in
    small stay so until the kernel finds the time, so the heap is made longer before it is needed: addresses, no memory.
    """

    def __init__(self) -> None:
        self._end = 0  # of what huge pages were asked for
        self._libc: ctypes.CDLL | None = None
        with suppress(OSError, AttributeError):
            if "[never]" not in _HUGE_PAGES.read_text():
                self._libc = _memory_functions()
                _lengthen(self._libc)
                self.follow()

    def follow(self) -> None:
        """Ask for huge pages where the heap has grown since the last call."""
        if self._libc is None or (end := self._libc.sbrk(0)) <= self._end:
            return
        begin, self._end = self._end, end
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                first, last = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
                if (first := max(first, begin)) < last:
                    self._libc.madvise(first, last - first, _MADV_HUGEPAGE)  # if that is refused, pages are small


def _memory_functions() -> ctypes.CDLL:
    """The C library with its types said. Raises AttributeError where it lacks one."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _lengthen(libc: ctypes.CDLL) -> None:
    """Add `_AHEAD_BYTES` of addresses to the end of a heap that is never trimmed, in blocks that come from there."""
    size = _LARGEST_MMAP_THRESHOLD_BYTES // 2
    blocks = [libc.malloc(size) for _ in range(_AHEAD_BYTES // size)]
    for block in blocks:
        libc.free(block)


def give_back_freed_memory() -> bool:
    """Let this process give back large blocks that it frees; False if the C library cannot."""
    return _set({_M_MMAP_THRESHOLD: _SMALL_BYTES, _M_TRIM_THRESHOLD: 2 * _TOP_PAD_BYTES, _M_TOP_PAD: _TOP_PAD_BYTES})


def _set(settings: Mapping[int, int]) -> bool:
    """For the whole process, until it is set again."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError):
        return False
    accepted = [libc.mallopt(name, value) == 1 for name, value in settings.items()]
    return all(accepted)


def give_back_now() -> None:
    """Give pages that are free inside the heap back to the system, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
