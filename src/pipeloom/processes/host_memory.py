"""What becomes of freed host memory: it stays in the process, as a caching allocator keeps it on a GPU, or goes back.

The C library gives the top of its heap back to the system whenever enough of it is free, and maps and unmaps large
blocks one by one. A training step frees the activations of every micro-batch it has finished, so the same pages are
given back and faulted in again all the time: thousands of page faults a step, 2 to 4 % of the time of a small GPT.

But a heap that is kept whole has holes. Parameters that are gathered for a moment, and gradients that are summed up
and freed, have many sizes: a process that held 435 MB of tensors at most had a heap of 784 MB. Where parameters are
freed to save memory, large blocks are mapped one by one after all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

# From malloc.h of glibc. Other C libraries do not know them, or have no mallopt at all.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no more; larger tensors are still mapped one by one
_NEVER_TRIM = 2**31 - 1  # mallopt takes an int
_TOP_PAD_BYTES = 16 << 20
_SMALL_BYTES = 4 << 20  # pages of smaller blocks would be faulted in too often


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to its peak; False if the C library cannot."""
    return _set(
        {
            _M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD_BYTES,
            _M_TRIM_THRESHOLD: _NEVER_TRIM,
            _M_TOP_PAD: _TOP_PAD_BYTES,
        }
    )


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
