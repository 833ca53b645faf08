"""Freed host memory stays in the process, as a caching allocator keeps it on a GPU.

The C library gives the top of its heap back to the system whenever enough of it is free, and maps and unmaps large
blocks one by one. A training step frees the activations of every micro-batch it has finished, so the same pages are
given back and faulted in again all the time: thousands of page faults a step, 2 to 4 % of the time of a small GPT.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

# From malloc.h of glibc. Other C libraries do not know them, or have no mallopt at all.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no more; larger tensors are still mapped one by one
_NEVER_TRIM = 2**31 - 1  # mallopt takes an int
_TOP_PAD_BYTES = 16 << 20


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to its peak. Once, for the process; False if the C library cannot."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError):
        return False
    settings = {
        _M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD_BYTES,
        _M_TRIM_THRESHOLD: _NEVER_TRIM,
        _M_TOP_PAD: _TOP_PAD_BYTES,
    }
    accepted = [libc.mallopt(name, value) == 1 for name, value in settings.items()]
    return all(accepted)


def give_back_freed_memory() -> None:
    """Give pages that are free inside the heap back to the system, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
