"""Objects in place of files: a `datasets.Dataset`, or any iterable of records."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeloom.data.parts import Read
from pipeloom.data.shards import Line, Shard, Text, texts_of
from pipeloom.errors import DataError

Records = Iterable[Mapping[str, Any]]
_ROWS = 1 << 16  # of a shard, where their size is not known
_SHARD_BYTES = 1 << 24


class Rows(NamedTuple):
    """The records of an object as shards of rows, and the function that reads them."""

    shards: list[Shard]
    read: Read


def rows_of(records: Records, version: str | None) -> Rows:
    """The rows of an object.

    Args:
        records: a `datasets.Dataset`, or an iterable whose iterations give the same records each time.
        version: what changes with the content; None: the fingerprint of a `datasets.Dataset`.

    Raises:
        DataError: the object has no fingerprint, and there is no version.
    """
    name, number = type(records).__name__, None
    if callable(getattr(records, "select", None)) and callable(getattr(records, "__len__", None)):
        number = len(records)  # type: ignore[arg-type]
    version = version or getattr(records, "_fingerprint", None)
    if not version:
        raise DataError(
            f"data of type {name}: has no fingerprint, by which its tokens are found again. Pass version, a text that "
            "changes with its content."
        )
    row_bytes = _row_bytes(records)
    rows = max(1, int(_SHARD_BYTES / row_bytes)) if row_bytes else _ROWS
    spans = [range(start, min(start + rows, number)) for start in range(0, number, rows)] if number else [None]
    shards = []
    for index, span in enumerate(spans):
        first, size = (0, 0) if span is None else (span.start, int(row_bytes * len(span)))
        shards.append(Shard(f"{name} from row {first}", str(index), size, str(version)))
    return Rows(shards, lambda shard, field: _read(records, spans[int(shard.name)], field))


def _row_bytes(records: Records) -> float:
    """Bytes of a row of a `datasets.Dataset`, of all columns; 0 if they are not known."""
    table = getattr(records, "data", None)
    size, rows = getattr(table, "nbytes", None), getattr(table, "num_rows", None)
    return size / rows if isinstance(size, int) and isinstance(rows, int) and rows else 0.0


def _read(records: Records, span: range | None, field: str) -> Iterator[Text | None]:
    chosen = records if span is None else records.select(span)  # type: ignore[attr-defined]
    for row, record in enumerate(chosen, start=span.start if span else 0):
        yield from texts_of(Line(f"{type(records).__name__} row {row}", b"", record), field)
