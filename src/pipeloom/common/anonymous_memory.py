"""`telling_of_memory`: errors of the kernel about anonymous memory (memfd), as one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom.errors import RunError


@contextmanager
def telling_of_memory(purpose: str, num_bytes: int) -> Iterator[None]:
    """Turn an OSError in the block into RunError.

    Args:
        purpose: of the memory, with which the line begins.
        num_bytes: its size.
    """
    try:
        yield
    except OSError as error:
        fix = "It counts as a file: raise `ulimit -f`" if error.errno == errno.EFBIG else "Free memory"
        raise RunError(f"{purpose}: {num_bytes:,} bytes of memory cannot be had ({error.strerror}). {fix}.") from error
