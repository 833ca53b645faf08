"""`Store`: bytes outside of the device's memory, in regions.

    HostStore    host memory, pinned where there is a GPU
    FileStore    one unnamed file, which the kernel deletes when the process ends, however it ends

Reads and writes block.
"""

import errno
import mmap
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pipeloom.devices import device_of
from pipeloom.engine.overlap_times import Wait, no_wait
from pipeloom.errors import RunError
from pipeloom.parallel.options import CPU, OffloadTarget

PAGE_BYTES = 4096  # alignment of addresses, offsets and lengths for direct I/O
PIECE_BYTES = 4 << 20  # size of a thread's own buffer; whole pages


class Region(NamedTuple):
    """Some bytes of a store."""

    offset: int
    num_bytes: int

    def part(self, offset: int, num_bytes: int) -> "Region":
        """Some bytes of this region."""
        return Region(self.offset + offset, num_bytes)


def aligned(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def queued_work(device: torch.device) -> Wait:
    """What waits for the work queued on a device so far. On a GPU, a thread that moves memory has to call it."""
    return torch.cuda.current_stream(device).record_event().synchronize if device.type == "cuda" else no_wait


class Store(ABC):
    """Regions of bytes.

    Attributes:
        read_bytes, written_bytes: so far.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self._free: dict[int, list[Region]] = {}
        self._end = 0
        self._lock = threading.Lock()
        self._rooms = threading.local()

    def reserve(self, num_bytes: int) -> Region:
        """A region of whole pages.

        Raises:
            RunError: the store is full.
        """
        size = aligned(num_bytes)
        with self._lock:
            if self._free.get(size):
                return self._free[size].pop()
            region = Region(self._end, size)
            self._grow(region)
            self._end += size
            return region

    def release(self, region: Region) -> None:
        """Free the region, for reuse by a region of the same size."""
        with self._lock:
            self._free.setdefault(region.num_bytes, []).append(region)

    def write(self, region: Region, values: Tensor) -> None:
        """Put bytes, at most as many as the region has, at its beginning."""
        self._move(region, values, writes=True)
        self.written_bytes += values.numel()

    def read(self, region: Region, values: Tensor) -> None:
        """Fill `values` from the region's beginning."""
        self._move(region, values, writes=False)
        self.read_bytes += values.numel()

    def room(self, device: torch.device) -> Tensor:
        """A page-aligned buffer of `PIECE_BYTES` that belongs to this thread."""
        rooms: dict[str, Tensor] = vars(self._rooms)
        if str(device) not in rooms:
            rooms[str(device)] = page_buffer(PIECE_BYTES, device)
            # Another thread may have freed this memory while kernels that use it were still to run.
            device_of(device).synchronize()
        return rooms[str(device)]

    @abstractmethod
    def view(self, region: Region) -> Tensor:
        """The region's bytes on the host. Writes to them go to the store."""

    @abstractmethod
    def snapshot(self, region: Region) -> Tensor:
        """The region's current bytes on the host, read on access. Writes to them do not go to the store."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory or the file."""

    @abstractmethod
    def _grow(self, region: Region) -> None: ...

    @abstractmethod
    def _move(self, region: Region, values: Tensor, *, writes: bool) -> None: ...


def open_store(target: OffloadTarget) -> Store:
    """The store of an offload target."""
    if target.kind == CPU:
        return HostStore()
    assert target.directory is not None
    return FileStore(target.directory)


class HostStore(Store):
    """Host memory; pinned where there is a GPU, for asynchronous copies."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, Tensor] = {}  # by offset of the region that it was made for

    def _grow(self, region: Region) -> None:
        pinned = torch.cuda.is_available()
        self._blocks[region.offset] = torch.empty(region.num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _move(self, region: Region, values: Tensor, *, writes: bool) -> None:
        held = self.view(region)[: values.numel()]
        copy_across(*((held, values) if writes else (values, held)))

    def view(self, region: Region) -> Tensor:
        start = max(offset for offset in self._blocks if offset <= region.offset)
        return self._blocks[start][region.offset - start :][: region.num_bytes]

    def snapshot(self, region: Region) -> Tensor:
        return self.view(region).clone()

    def close(self) -> None:
        self._blocks.clear()


def copy_across(target: Tensor, source: Tensor) -> None:
    """Copy between any dtypes and devices, and wait; to or from a GPU on a new stream."""
    device = next((t.device for t in (target, source) if t.device.type == "cuda"), None)
    if device is None:
        target.copy_(source)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


class FileStore(Store):
    """One file in a directory.

    The file is unnamed (O_TMPFILE, or unlinked once open), so it never outlives the process. Its blocks are allocated
    when they are reserved, so a full disk shows then and not in a write. Where the file system supports direct I/O,
    data bypasses the page cache, which is memory too.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # closed by close()
        self._plain = self._file.fileno()
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # a file system or a system without
            self._direct = os.open(f"/proc/self/fd/{self._plain}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def _grow(self, region: Region) -> None:
        try:
            os.posix_fallocate(self._plain, region.offset, region.num_bytes)
        except OSError as error:
            raise RunError(
                f"offload to {self._directory}: no space for {region.num_bytes / 2**20:,.1f} MiB in addition to "
                f"{self._end / 2**20:,.1f} MiB ({error.strerror}). Free space, or use another directory."
            ) from error

    def _move(self, region: Region, values: Tensor, *, writes: bool) -> None:
        """Copy between file and memory: directly where addresses allow it, else through this thread's buffer."""
        size = values.numel()
        in_pages = (region.offset | region.num_bytes) % PAGE_BYTES == 0  # no other region shares a page
        if values.device.type == "cpu" and (not in_pages or (values.data_ptr() | size) % PAGE_BYTES == 0):
            self._transfer(values, region.offset, writes, direct=in_pages)
            return
        buffer = self.room(torch.device("cpu"))
        for start in range(0, size, PIECE_BYTES):
            piece = values[start : start + PIECE_BYTES]
            room = buffer[: piece.numel()]
            whole = buffer[: aligned(piece.numel())] if in_pages else room
            if writes:
                copy_across(room, piece)
            self._transfer(whole, region.offset + start, writes, direct=in_pages)
            if not writes:
                copy_across(piece, room)

    def _transfer(self, values: Tensor, offset: int, writes: bool, *, direct: bool) -> None:
        call, memory, done = os.pwritev if writes else os.preadv, memoryview(cast(Any, values.numpy())), 0
        try:
            while done < len(memory):
                around = direct and done % PAGE_BYTES == 0
                descriptor = self._direct if around and self._direct is not None else self._plain
                try:
                    moved = call(descriptor, [memory[done:]], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or descriptor == self._plain:
                        raise
                    self._direct = None  # a file system that reports it late
                    continue
                if not moved:
                    raise OSError(errno.EIO, "the file ends too early")
                done += moved
        except OSError as error:
            raise RunError(
                f"offload to {self._directory}: its file cannot be {'written' if writes else 'read'} "
                f"({error.strerror}). Check the disk, then resume from the last checkpoint."
            ) from error

    def view(self, region: Region, flags: int = mmap.MAP_SHARED) -> Tensor:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(self._plain, region.num_bytes, flags=flags, prot=both, offset=region.offset)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def snapshot(self, region: Region) -> Tensor:
        return self.view(region, mmap.MAP_PRIVATE)

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None
        self._file.close()

    def __del__(self) -> None:
        with suppress(Exception):  # after an error in the constructor
            self.close()


def page_buffer(num_bytes: int, device: torch.device | None = None) -> Tensor:
    """A uint8 buffer; on the host it is page-aligned, as direct I/O needs."""
    if device is not None and device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    own = mmap.mmap(-1, max(aligned(num_bytes), PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(own, dtype=torch.uint8)[:num_bytes]
