"""Objects in place of files: a `datasets.Dataset`, or any iterable of records."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeloom.data.parts import Read
from pipeloom.data.shards import Line, Shard, Text, texts_of
from pipeloom.errors import DataError

Records = Iterable[Mapping[str, Any]]
_ROWS = 1 << 16  # of a part


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
    starts = [0] if number is None else range(0, number, _ROWS)
    shards = [Shard(f"{name} from row {start}", str(start), 0, str(version)) for start in starts]
    return Rows(shards, lambda shard, field: _read(records, number, shard, field))


def _read(records: Records, number: int | None, shard: Shard, field: str) -> Iterator[Text | None]:
    start, chosen = int(shard.name), records
    if number is not None:
        chosen = records.select(range(start, min(start + _ROWS, number)))  # type: ignore[attr-defined]
    for row, record in enumerate(chosen, start=start):
        yield from texts_of(Line(f"{type(records).__name__} row {row}", b"", record), field)
