"""Memory of a CUDA device with a file descriptor, which other processes map.

torch shares memory of its caching allocator instead. It counts the users of each tensor in a file in /dev/shm, which
stays behind where a process is killed. A descriptor is closed by the kernel, however a process ends, and the memory
lives as long as one process maps it. See "Virtual Memory Management" in the CUDA Driver API.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RunError

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_Handle = ctypes.c_ulonglong  # CUmemGenericAllocationHandle
_Address = ctypes.c_ulonglong  # CUdeviceptr
_ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemGetAllocationGranularity": [ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(_Properties), ctypes.c_int],
    "cuMemCreate": [ctypes.POINTER(_Handle), ctypes.c_size_t, ctypes.POINTER(_Properties), ctypes.c_ulonglong],
    "cuMemRelease": [_Handle],
    "cuMemExportToShareableHandle": [ctypes.c_void_p, _Handle, ctypes.c_int, ctypes.c_ulonglong],
    "cuMemImportFromShareableHandle": [ctypes.POINTER(_Handle), ctypes.c_void_p, ctypes.c_int],
    "cuMemAddressReserve": [
        ctypes.POINTER(_Address), ctypes.c_size_t, ctypes.c_size_t, _Address, ctypes.c_ulonglong
    ],
    "cuMemAddressFree": [_Address, ctypes.c_size_t],
    "cuMemMap": [_Address, ctypes.c_size_t, ctypes.c_size_t, _Handle, ctypes.c_ulonglong],
    "cuMemUnmap": [_Address, ctypes.c_size_t],
    "cuMemSetAccess": [_Address, ctypes.c_size_t, ctypes.POINTER(_Access), ctypes.c_size_t],
}  # fmt: skip


@lru_cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call the driver.

    Raises:
        torch.OutOfMemoryError: the device has no memory left.
        RunError: any other error.
    """
    code = getattr(_driver(), name)(*arguments)
    if code == 0:
        return
    texts = []
    for describe in (_driver().cuGetErrorName, _driver().cuGetErrorString):
        text = ctypes.c_char_p()
        describe(code, ctypes.byref(text))
        texts.append((text.value or b"unknown").decode())
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has no memory left for messages between processes")
    raise RunError(
        f"{name} failed ({texts[0]}, {texts[1]}): processes cannot share memory of this CUDA device. Use transport="
        "'torch' and a device per process."
    )


class _Mapping:
    """Addresses of shared memory; unmapped with the last tensor that uses them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


class SharedAllocations:
    """Makes and opens memory with a descriptor.

    Args:
        device: on which it is mapped, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index: int = device.index
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._index)  # the one that torch uses
        self._properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, self._index))
        granularity = ctypes.c_size_t()
        with self._current():
            _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def make(self, num_bytes: int) -> tuple[Tensor, int]:
        """Memory of a multiple of `granularity` bytes, and its descriptor.

        Raises:
            torch.OutOfMemoryError: the device has no memory left.
            RunError: the driver refuses for another reason.
        """
        size = self.round_up(num_bytes)
        handle, descriptor = _Handle(), ctypes.c_int(-1)
        with self._current():
            create = (ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
            try:
                _call("cuMemCreate", *create)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # torch keeps memory that no tensor uses
                _call("cuMemCreate", *create)
            try:
                content = self._map(handle, size)
                _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, 0)
            finally:
                _call("cuMemRelease", handle)  # mappings and descriptors keep the memory
        return content, descriptor.value

    def open(self, num_bytes: int, descriptor: int) -> Tensor:
        """The memory that another process made with this size.

        Raises:
            RunError: the driver refuses.
        """
        size, handle = self.round_up(num_bytes), _Handle()
        with self._current():
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _DESCRIPTOR)
            try:
                return self._map(handle, size)
            finally:
                _call("cuMemRelease", handle)

    def round_up(self, num_bytes: int) -> int:
        """The size of memory for this many bytes."""
        return max(1, -(-num_bytes // self.granularity)) * self.granularity

    def _map(self, handle: Any, size: int) -> Tensor:
        address, access = _Address(), _Access(_Location(_ON_DEVICE, self._index), _READ_AND_WRITE)
        _call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        try:
            _call("cuMemMap", address, size, 0, handle, 0)
        except BaseException:
            _call("cuMemAddressFree", address, size)
            raise
        mapping = _Mapping(address.value, size)
        weakref.finalize(mapping, self._unmap, address.value, size).atexit = False
        _call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        with torch.inference_mode(False):  # messages are copied into it in other modes too
            return torch.as_tensor(mapping, device=self._device)

    def _unmap(self, address: int, size: int) -> None:
        with self._current():
            _call("cuMemUnmap", address, size)
            _call("cuMemAddressFree", address, size)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Inside the block, the device's context is this thread's."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
