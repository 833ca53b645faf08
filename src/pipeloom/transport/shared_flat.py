"""`SharedFlat`: a flat tensor that several processes of a host map. Each writes a segment; all read it in place.

    values         private mapping: what this process writes there, it alone reads, until `forget`
    segment(...)   shared mapping: what one process writes there, all processes read

The memory is a memory file without a name (memfd): it goes with its last mapping, however processes end.
"""

import ctypes
import mmap
import os

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.processes.host_memory import telling_of_memory
from pipeloom.transport.shared_block import mapped

_C = ctypes.CDLL(None, use_errno=True)
_C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


class SharedFlat:
    """A tensor of zeros at first, until processes write.

    Args:
        descriptor: of the memory file; closed here.
        num_elements: of the tensor.
        dtype: of the tensor.

    Attributes:
        values: the whole tensor, to be read.
    """

    def __init__(self, descriptor: int, num_elements: int, dtype: torch.dtype) -> None:
        self._itemsize, self._num_bytes = dtype.itemsize, num_elements * dtype.itemsize
        try:
            self._shared = mapped(descriptor, self._num_bytes)
            self._private = mapped(descriptor, self._num_bytes, mmap.MAP_PRIVATE | _NO_RESERVE)
        finally:
            os.close(descriptor)
        self.values = torch.frombuffer(self._private, dtype=dtype)

    def segment(self, elements: slice) -> Tensor:
        """Some elements, to be written: the others read them after some exchange with this process."""
        start, stop, _ = elements.indices(self._num_bytes // self._itemsize)
        offset = start * self._itemsize
        return torch.frombuffer(self._shared, dtype=self.values.dtype, count=stop - start, offset=offset)

    def forget(self) -> None:
        """Drop what this process wrote into `values`, and return its page table entries."""
        if _C.madvise(ctypes.addressof(self._private), self._num_bytes, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise kept what was written into shared parameters")


def memory_file(num_bytes: int, purpose: str) -> int:
    """The descriptor of a new memory file. Raises RunError with the `purpose` where there is no memory for it."""
    descriptor = os.memfd_create("pipeloom", os.MFD_CLOEXEC)
    try:
        with telling_of_memory(purpose, num_bytes):
            os.ftruncate(descriptor, num_bytes)
    except RunError:
        os.close(descriptor)
        raise
    return descriptor
