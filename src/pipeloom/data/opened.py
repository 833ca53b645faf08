"""Opens files of training data: local or behind a URL of `fsspec`, plain or compressed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from pipeloom.errors import DataError, one_line


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/shards``."""
    return "://" in path


def without_query(path: str) -> str:
    """A path, or a URL without what follows its question mark."""
    return path.partition("?")[0] if is_url(path) else path


def unreadable(file: str | Path, error: Exception) -> DataError:
    """The error about a file of data."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    return DataError(f"data file {file}: {reason}. Make it readable, or leave it out.")


class Opened(NamedTuple):
    """The decompressed content of a file, and the file itself."""

    content: BinaryIO
    raw: BinaryIO


@contextmanager
def opened(path: str) -> Iterator[Opened]:
    """The decompressed content of a file, and the file itself.

    Raises:
        DataError: it cannot be read, it is damaged, or a library is missing.
    """
    try:
        with _raw(path) as raw:
            if without_query(path).lower().endswith(".gz"):
                yield Opened(cast(BinaryIO, gzip.GzipFile(fileobj=raw)), raw)
            elif without_query(path).lower().endswith(".zst"):
                yield Opened(cast(BinaryIO, io.BufferedReader(_zstandard(path, raw))), raw)
            elif is_url(path):  # files of fsspec have no limit of a line's length
                yield Opened(cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, raw))), raw)
            else:
                yield Opened(raw, raw)
    except (DataError, UnicodeDecodeError, MemoryError):
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"data file {path}: is damaged ({one_line(error)}). Copy it again, or leave it out.") from None
    except Exception as error:  # of any type, from file systems, pyarrow and zstandard
        raise unreadable(path, error) from None


@contextmanager
def _raw(path: str) -> Iterator[BinaryIO]:
    if not is_url(path):
        with open(path, "rb") as file:
            yield file
        return
    with open_file_system(path)[0].open(path, "rb") as file:
        yield cast(BinaryIO, file)


def open_file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises DataError if a library is missing."""
    try:
        import fsspec
    except ImportError:
        raise DataError(f"data {url}: fsspec is not installed. Run pip install 'pipeloom[data]'.") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"data {url}: {one_line(error)}. Install it, or use another URL.") from None
    except ValueError as error:
        raise DataError(f"data {url}: {one_line(error)}. Use a URL that fsspec knows.") from None
    return system, str(path)


def _zstandard(path: str, raw: BinaryIO) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"data file {path}: zstandard is not installed. Run pip install 'pipeloom[data]', or decompress the file."
        ) from None
    return _Frames(raw, zstandard.ZstdDecompressor())


_COMPRESSED_BYTES = 1 << 10  # decompressed at once: at most 32 MiB come of it, as 4 bytes may be a block of 128 KiB


class _Frames(io.RawIOBase):
    """The content of a Zstandard file of any number of frames; one that ends too early raises EOFError."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._rest, self._made = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            compressed = self._rest or self._raw.read(_COMPRESSED_BYTES)
            self._rest = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._made = self._frame.decompress(compressed)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        number = min(len(buffer), len(self._made))
        buffer[:number], self._made = self._made[:number], self._made[number:]
        return number
