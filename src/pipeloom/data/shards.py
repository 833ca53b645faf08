"""Files of training data: text, JSON lines and Parquet, plain or compressed, local or behind a URL of `fsspec`.

name                                a document per
*.jsonl, *.jsonl.gz, *.jsonl.zst    line: an object with the text under a key
*.parquet                           row: the text is in a column
all others, also *.gz and *.zst     file
"""

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipeloom.common.json_reader import parse_json
from pipeloom.data.opened import opened, unreadable, without_query
from pipeloom.errors import DataError, shortened

JSON_LINES, PARQUET = ".jsonl", ".parquet"
_COMPRESSED = (".gz", ".zst")
_ROWS = 1024  # of a Parquet file that are read together
_PIECE = 1 << 20  # characters of a long document that are tokenized together
_LARGE = 1 << 24  # bytes or characters of a file of text that is not held in memory
_LONGEST_LINE = 1 << 28  # bytes: a small compressed file may hold a line that no memory does


class Shard(NamedTuple):
    """A file of training data.

    Attributes:
        path: its path, or its URL.
        name: its path below the directory of the data, with ``/``.
        num_bytes: its size, 0 if it is not known.
        version: what changes with its content.
    """

    path: str
    name: str
    num_bytes: int
    version: int | str

    @classmethod
    def of(cls, file: Path, root: Path) -> "Shard":
        """The shard of a local file. Raises DataError if it cannot be read."""
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable(file, error) from None
        name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()
        return cls(str(file), name, stat.st_size, stat.st_mtime_ns)

    @property
    def kind(self) -> str:
        """``.jsonl``, ``.parquet``, or "" for text."""
        return kind_of(self.path)


class Line(NamedTuple):
    """A line of JSON lines, or a row of a Parquet file: where it is, its bytes, and its object."""

    place: str
    content: bytes
    record: Mapping[str, Any]


class Text(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        text: of it.
        key: decides whether the document is for validation.
        begins, ends: whether it is the first and the last piece of the document.
        num_read: bytes of the file read so far.
    """

    text: str
    key: bytes
    begins: bool
    ends: bool
    num_read: int


def kind_of(path: str) -> str:
    """``.jsonl``, ``.parquet``, or "" for text."""
    name = without_query(path).lower()
    stem = name
    for ending in _COMPRESSED:
        stem = stem.removesuffix(ending)
    return JSON_LINES if stem.endswith(JSON_LINES) else PARQUET if name.endswith(PARQUET) else ""


# Lines and rows


def read_lines(file: str | Path, columns: list[str] | None = None) -> Iterator[Line]:
    """The objects of JSON lines, or the rows of a Parquet file.

    Args:
        file: a path or a URL.
        columns: of a Parquet file that are read; None: all.

    Raises:
        DataError: the file cannot be read, or a line has no object.
    """
    for line, _ in _counted_lines(str(file), columns):
        yield line


def _counted_lines(path: str, columns: list[str] | None) -> Iterator[tuple[Line, int]]:
    with opened(path) as file:
        if kind_of(path) == PARQUET:
            yield from _rows(path, file.raw, columns)
            return
        lines = iter(lambda: file.content.readline(_LONGEST_LINE + 1), b"")
        for number, content in enumerate(lines, start=1):
            if len(content) > _LONGEST_LINE:
                raise DataError(f"{path} line {number} has more than {_LONGEST_LINE:,} bytes. Split it.")
            if content.strip():
                yield _line(f"{path} line {number}", content), file.raw.tell()


def _line(place: str, content: bytes) -> Line:
    try:
        record = parse_json(content)
    except UnicodeDecodeError:
        raise DataError(f"{place} is not UTF-8 text. Change it.") from None
    except ValueError:
        raise DataError(f"{place} is not JSON: must be one object per line. Change it.") from None
    if not isinstance(record, dict):
        raise DataError(f"{place} is not a JSON object: must be one per line. Change it.")
    return Line(place, content, record)


def _rows(path: str, file: BinaryIO, columns: list[str] | None) -> Iterator[tuple[Line, int]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"data file {path}: pyarrow is not installed. Run pip install 'pipeloom[data]'.") from None
    try:
        yield from _rows_of(path, file, pyarrow.parquet.ParquetFile(file), columns)
    except (UnicodeDecodeError, pyarrow.ArrowMemoryError) as error:  # of a damaged file
        raise unreadable(path, error) from None


def _rows_of(path: str, file: BinaryIO, parquet: Any, columns: list[str] | None) -> Iterator[tuple[Line, int]]:
    names = list(parquet.schema_arrow.names)
    for column in columns or ():
        if column not in names:
            found = shortened(", ".join(names), 200)
            raise DataError(f"data file {path} has columns {found}: no {column}. Set --data.field.")
    number, total = 0, max(1, parquet.metadata.num_rows)
    size = file.seek(0, os.SEEK_END)
    for batch in parquet.iter_batches(batch_size=_ROWS, columns=columns):
        for row in batch.to_pylist():
            number += 1
            content = json.dumps(row, sort_keys=True, default=str).encode() if columns is None else b""
            yield Line(f"{path} row {number}", content, row), size * number // total


# Text


def read_texts(shard: Shard, field: str) -> Iterator[Text | None]:
    """The documents of a shard, long ones in several pieces; None for a file that is not UTF-8 text.

    Args:
        shard: a file.
        field: the key or the column of the text.

    Raises:
        DataError: the file cannot be read, or a line or row has no text.
    """
    return read_rows(shard.path, field) if shard.kind else _whole_text(shard)


def read_rows(path: str, field: str) -> Iterator[Text]:
    """The documents of a Parquet file, or of JSON lines in a file of any other name; see `read_texts`."""
    for line, num_read in _counted_lines(path, [field]):
        yield from texts_of(line, field, num_read)


def texts_of(line: Line, field: str, num_read: int = 0) -> Iterator[Text]:
    """The pieces of the document of a line or row. Raises DataError if it has no text."""
    text = text_of(line, field)
    try:
        key = text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{line.place}: {field} has half of a surrogate pair. Change it.") from None
    *others, last = pieces_of(text)
    for number, piece in enumerate((*others, last)):
        yield Text(piece, key, number == 0, number == len(others), num_read)


def _whole_text(shard: Shard) -> Iterator[Text | None]:
    """The pieces of a file that is one document. A large one is read twice, rather than held in memory."""
    key, large = os.fsencode(shard.name), shard.num_bytes > _LARGE
    pieces: list[tuple[str, int]] = []
    number = 0  # characters
    try:
        for each in _text_pieces(shard.path):
            number += len(each[0])
            if large or number > _LARGE:  # of a compressed file, the size says little
                large, pieces = True, []
            else:
                pieces.append(each)
    except UnicodeDecodeError:
        yield None
        return
    begins, before = True, None
    for each in _text_pieces(shard.path) if large else pieces:
        if before is not None:
            yield Text(before[0], key, begins, False, before[1])
            begins = False
        before = each
    if before is not None:
        yield Text(before[0], key, begins, True, before[1])


def _text_pieces(path: str) -> Iterator[tuple[str, int]]:
    """The pieces of a text file, and the bytes read so far. Raises UnicodeDecodeError if it is not UTF-8 text."""
    decoder, rest = codecs.getincrementaldecoder("utf-8-sig")(), ""  # a byte order mark is no text
    with opened(path) as file:
        while content := file.content.read(_PIECE):
            if b"\0" in content:
                raise UnicodeDecodeError("utf-8", content, 0, 1, "a NUL is in no text")
            *whole, rest = pieces_of(rest + decoder.decode(content))
            for piece in whole:
                yield piece, file.raw.tell()
        yield rest + decoder.decode(b"", final=True), file.raw.tell()


def text_of(line: Line, field: str) -> str:
    """The text of a line. Raises DataError if there is none."""
    if field not in line.record:
        keys = shortened(", ".join(map(str, line.record)), 200) or "no keys"
        raise DataError(f"{line.place} has {keys}: no {field}. Set --data.field, or change the line.")
    value = line.record[field]
    if not isinstance(value, str):
        raise DataError(f"{line.place}: {field} is {json_word(value)}, and must be a string. Change it.")
    return value


def json_word(value: Any) -> str:
    """What a value is, for errors: ``null``, or its type."""
    return "null" if value is None else f"a {type(value).__name__}"


def pieces_of(text: str) -> list[str]:
    """A text in pieces of at most 2 ** 20 characters, cut behind line breaks where there are some.

    Tokenizers need many times the memory of a text, and most read a line break between two words alike at an end.
    """
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        stop = _cut(text, start + _PIECE // 2, start + _PIECE)
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _cut(text: str, first: int, last: int) -> int:
    """Where to cut a text: behind the last line break between two words, else before the last space, else at `last`."""
    place = last
    while (place := text.rfind("\n", first, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
    place = text.rfind(" ", first, last)
    return last if place < 0 else place
