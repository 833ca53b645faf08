"""Host memory: whether what is freed stays in the process, and errors about anonymous memory.

A process keeps freed memory as a GPU's caching allocator does, or returns it to the system.

By default the C library returns the top of its heap to the system whenever enough of it is free, and maps and unmaps
large blocks one by one. A training step frees the activations of every finished micro-batch, so the same pages are
returned and faulted in again and again: thousands of page faults per step, 2 to 4 % of the time of a small GPT.

A heap that keeps everything becomes fragmented, however. Gathered parameters and reduced gradients have many sizes: a
process with at most 435 MB of tensors had a heap of 784 MB. Where parameters are freed to save memory, large blocks are
therefore mapped one by one.
"""

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipeloom.errors import RunError

# From glibc's malloc.h. Other C libraries have other options, or no mallopt at all.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no more; larger tensors are still mapped one by one
_NEVER_TRIM = 2**31 - 1  # mallopt takes an int
_TOP_PAD_BYTES = 16 << 20
_SMALL_BYTES = 4 << 20  # pages of smaller blocks would be faulted in too often


def keep_freed_memory() -> bool:
    """Keep freed memory in this process, up to its peak; returns whether the C library supports it."""
    return _set_malloc(mmap_threshold=_LARGEST_MMAP_THRESHOLD_BYTES, trim_threshold=_NEVER_TRIM)


def give_back_freed_memory() -> bool:
    """Return large freed blocks to the system; returns whether the C library supports it."""
    return _set_malloc(mmap_threshold=_SMALL_BYTES, trim_threshold=2 * _TOP_PAD_BYTES)


def _set_malloc(*, mmap_threshold: int, trim_threshold: int) -> bool:
    """Set options of malloc for the whole process; returns whether all were accepted."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError):
        return False
    options = {_M_MMAP_THRESHOLD: mmap_threshold, _M_TRIM_THRESHOLD: trim_threshold, _M_TOP_PAD: _TOP_PAD_BYTES}
    accepted = [libc.mallopt(name, value) == 1 for name, value in options.items()]
    return all(accepted)


def give_back_now() -> None:
    """Return free pages inside the heap to the system, where the C library supports it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def telling_of_memory(purpose: str, num_bytes: int) -> Iterator[None]:
    """Turn an OSError of the kernel about anonymous memory (memfd) in the block into RunError.

    Args:
        purpose: of the memory, with which the line begins.
        num_bytes: its size.
    """
    try:
        yield
    except OSError as error:
        fix = "It counts as a file: raise `ulimit -f`" if error.errno == errno.EFBIG else "Free memory"
        raise RunError(f"{purpose}: {num_bytes:,} bytes of memory cannot be had ({error.strerror}). {fix}.") from error
