"""``memory.json`` of a run: predicted and measured peak memory per process.

    {"kinds": ["parameters", ...],
     "processes": [{"process": 0, "copy": 0, "rank": 0, "predicted": {"parameters": 1.0, ..., "peak": 9.0},
                    "measured": {"parameters": 1.0, ..., "peak": null}}, ...]}

Values are bytes; null or missing: not measured. "peak" is the peak memory of all kinds together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.json_reader import Entry, read_json
from pipeloom.errors import InputError
from pipeloom.plan.memory.rank_memory import KINDS

FILE = "memory.json"
_KEYS = ("process", "copy", "rank", "predicted", "measured")  # of a process, in the order of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One process of a run.

    Attributes:
        process: global rank.
        replica, rank: number of its replica, and its rank in the pipeline.
        predicted, measured: bytes by kind, and "peak"; None: unknown.
    """

    process: int
    replica: int
    rank: int
    predicted: Mapping[str, float | None]
    measured: Mapping[str, float | None]


def write_memory(directory: Path, rows: Sequence[MemoryRow]) -> Path:
    """Write ``memory.json`` into a run's directory; one process writes the rows of all."""
    path = directory / FILE
    values = ((row.process, row.replica, row.rank, dict(row.predicted), dict(row.measured)) for row in rows)
    processes = [dict(zip(_KEYS, each, strict=True)) for each in values]
    write_whole(path, json.dumps({"kinds": list(KINDS), "processes": processes}, indent=1) + "\n")
    return path


def read_memory(directory: Path) -> list[MemoryRow]:
    """The inverse of `write_memory`.

    Raises:
        InputError: the file does not exist or has another format.
    """
    path = directory / FILE
    try:
        text = path.read_text(encoding="utf-8")
        data = read_json(text, str(path), "an object with kinds and processes").fields(("kinds", "processes"))
        return [_row(row) for row in data["processes"].members()]
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(
                f"{directory} has no {FILE}: `pipeloom train` writes it after its second step and when it ends. Pass "
                "the output directory of such a run."
            ) from error
        reason = error.strerror or error if isinstance(error, OSError) else "not a text file"
        raise InputError(f"{path} cannot be read ({reason}). Check the file.") from error


def _row(row: Entry) -> MemoryRow:
    data = row.fields(_KEYS)
    process, replica, rank = (data[name].whole() for name in _KEYS[:3])
    predicted, measured = (
        {kind: None if size.value is None else size.number() for kind, size in sizes.items()}
        for sizes in (data[name].fields((), (*KINDS, "peak")) for name in _KEYS[3:])
    )
    return MemoryRow(process=process, replica=replica, rank=rank, predicted=predicted, measured=measured)
