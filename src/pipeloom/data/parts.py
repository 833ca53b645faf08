"""Tokenizes shards in parts, one file of tokens each, by several processes at once.

shards   a.jsonl  b.jsonl  c.txt d.txt e.txt  f.parquet
parts    0        1        2                  3              one shard, or several small ones

A part has its training tokens first, then those for validation. A part whose shards and tokenizer stay the same is
tokenized once: a run that is killed goes on with the missing parts, and a new shard leaves the other parts as they are.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.data.shards import Shard, Text, read_texts
from pipeloom.data.token_cache import CheckedTokens
from pipeloom.data.tokenizers import Tokenizer

_FORMAT = 3  # increment when the same shards give another file of tokens
PART_BYTES = 1 << 25
_BATCH_CHARACTERS = 1 << 20
Told = Callable[[int, int], None]  # bytes read and tokens written since the last call
Read = Callable[[Shard, str], Iterator[Text | None]]  # the documents of a shard, as `read_texts`


class Part(NamedTuple):
    """Shards that are tokenized into one file.

    Attributes:
        shards: of it.
        field: the key or the column of the text.
        fraction: of the documents for validation, chosen by hash.
    """

    shards: Sequence[Shard]
    field: str
    fraction: float

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    def key(self, tokenizer: Tokenizer) -> str:
        """What identifies the file of tokens."""
        digest = blake2b(tokenizer.fingerprint, digest_size=12)
        fields = [self.field] if any(shard.kind for shard in self.shards) else []
        digest.update(json.dumps([_FORMAT, self.fraction, *fields, self.shards]).encode())
        return digest.hexdigest()


ABOUT = {
    **dict.fromkeys(("num_tokens", "num_train_tokens", "num_files", "num_documents", "num_bytes"), int),
    "skipped": {"not UTF-8 text": int, "empty": int},
    "digest": str,
}
"""The JSON that describes the tokens of a part."""


def parts_of(shards: Iterable[Shard], field: str, fraction: float, part_bytes: int = PART_BYTES) -> list[Part]:
    """Shards in parts of about `part_bytes`; a larger shard is a part of its own."""
    parts: list[list[Shard]] = []
    room = 0
    for shard in shards:
        if not parts or shard.num_bytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(shard)
        room -= shard.num_bytes
    return [Part(tuple(each), field, fraction) for each in parts]


def write_part(out: BinaryIO, part: Part, tokenizer: Tokenizer, told: Told, read: Read = read_texts) -> dict[str, Any]:
    """Write the tokens of a part; return the JSON that describes them.

    Raises:
        DataError: a shard cannot be read.
        OSError: the tokens cannot be written.
    """
    skipped = {"not UTF-8 text": 0, "empty": 0}
    num_files, num_documents = 0, 0
    digest = blake2b(digest_size=8)
    with tempfile.TemporaryFile(dir=Path(out.name).parent) as held_out:
        outs = (_Tokens(out, tokenizer), _Tokens(held_out, tokenizer))
        for shard in part.shards:
            num_read, before = 0, sum(each.number for each in outs)
            kept = False
            for text in read(shard, part.field):
                if text is None or (not text.text and text.begins and text.ends):
                    if text is None or not shard.kind:
                        skipped["not UTF-8 text" if text is None else "empty"] += 1
                    continue
                kept = True
                num_documents += text.ends
                if outs[_is_chosen(text.key, part.fraction)].add(text):
                    now = sum(each.number for each in outs)
                    told(text.num_read - num_read, now - before)
                    num_read, before = text.num_read, now
            num_files += kept
            for each in outs:
                each.flush()
            told(shard.num_bytes - num_read, sum(each.number for each in outs) - before)
        held_out.seek(0)
        while content := held_out.read(1 << 20):
            out.write(content)
    for each in outs:
        digest.update(each.digest.digest())
    return {
        "num_tokens": outs[0].number + outs[1].number,
        "num_train_tokens": outs[0].number,
        "num_files": num_files,
        "num_documents": num_documents,
        "num_bytes": part.num_bytes,
        "skipped": skipped,
        "digest": digest.hexdigest(),
    }


class _Tokens:
    """Writes the tokens of documents, many at once."""

    def __init__(self, out: Any, tokenizer: Tokenizer) -> None:
        self._out, self._tokenizer, self._start = out, tokenizer, list(tokenizer.start)
        self._waiting: list[Text] = []
        self._size = self.number = 0
        self.digest = blake2b(digest_size=8)

    def add(self, text: Text) -> bool:
        """Take a piece of a document; returns whether tokens were written."""
        self._waiting.append(text)
        self._size += len(text.text)
        if self._size <= _BATCH_CHARACTERS:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        if not self._waiting:
            return
        tokens = self._tokens()
        self._out.write(tokens.data)
        self.digest.update(tokens.data)
        self.number += len(tokens)
        self._waiting.clear()
        self._size = 0

    def _tokens(self) -> NDArray[Any]:
        tokenizer = self._tokenizer
        start, end = (np.asarray(each, tokenizer.dtype) for each in (self._start, tokenizer.end))
        pieces: list[NDArray[Any]] = []
        for text, ids in zip(self._waiting, tokenizer.plain([each.text for each in self._waiting]), strict=True):
            if text.begins and len(start):
                pieces.append(start)
            pieces.append(np.asarray(ids, tokenizer.dtype))
            if text.ends:
                pieces.append(end)
        return np.concatenate(pieces)


def _is_chosen(key: bytes, fraction: float) -> bool:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") < fraction * 2**64


class Joined:
    """Files of tokens behind each other, as one array that is read by slices.

    Args:
        arrays: the files, or cuts of them, of one dtype.
        dtype: of their numbers.
    """

    def __init__(self, arrays: Sequence[CheckedTokens], dtype: np.dtype[Any]) -> None:
        self.arrays, self.dtype = [each for each in arrays if len(each)], dtype
        self._ends = np.cumsum([len(each) for each in self.arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.arrays else 0

    def __getitem__(self, place: slice) -> NDArray[Any]:
        start, stop, _ = place.indices(len(self))
        found = [np.empty(0, self.dtype)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            array = self.arrays[number]
            begin = int(self._ends[number]) - len(array)
            found.append(array[start - begin : stop - begin])
            start += len(found[-1])
            number += 1
        return found[1] if len(found) == 2 else np.concatenate(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def cut(self, start: int, stop: int) -> "Joined":
        """The numbers from `start` on and before `stop`, without a copy."""
        return Joined(list(self._between(start, stop)), self.dtype)

    def max(self) -> int:
        """The largest number; 0 if there is none."""
        return max((int(each[:].max()) for each in self.arrays), default=0)

    def _between(self, start: int, stop: int) -> Iterator[CheckedTokens]:
        begin = 0
        for array in self.arrays:
            yield array.cut(max(0, start - begin), max(0, stop - begin))
            begin += len(array)
