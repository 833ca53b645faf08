"""A process that tokenizes: ``python -m pipeloom.data.worker TOKENIZER DIRECTORY``, started by `tokenize`.

It reads a key, a part and files with the rows of its shards per line, as JSON, and answers with lines of progress, and
one when the part is done. Where the shards are files themselves, there are no others.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeloom.data.parts import Part, write_part
from pipeloom.data.shards import Shard, Text, read_rows, read_texts
from pipeloom.data.token_cache import told, write_tokens
from pipeloom.data.tokenizer_files import load_tokenizer
from pipeloom.errors import DataError


def _answer(**fields: Any) -> None:
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:  # the process that started this one has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _tell(num_bytes: int, num_tokens: int) -> None:
    _answer(bytes=num_bytes, tokens=num_tokens)


def _read(files: Mapping[Shard, str], shard: Shard, field: str) -> Iterator[Text]:
    """The documents of a shard of records, from a file with JSON lines."""
    return read_rows(files[shard], field)


def main(source: str, directory: Path) -> int:
    """Tokenize parts until there are no more; returns the exit code."""
    try:
        tokenizer = load_tokenizer(source)
        for line in sys.stdin:
            key, (shards, field, fraction), rows = json.loads(line)
            part = Part(tuple(Shard(*shard) for shard in shards), field, fraction)
            files = dict(zip(part.shards, rows, strict=True)) if rows else {}
            read = partial(_read, files) if rows else read_texts
            with told(directory):
                write_tokens(directory, key, partial(write_part, part=part, tokenizer=tokenizer, told=_tell, read=read))
            _answer(done=key)
    except DataError as error:
        _answer(error=str(error))
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
