"""A process that tokenizes: ``python -m pipeloom.data.worker TOKENIZER DIRECTORY``, started by `tokenize`.

It reads a key and a part per line, as JSON, and answers with lines of progress, and one when the part is done.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pipeloom.data.parts import Part, write_part
from pipeloom.data.shards import Shard
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


def main(source: str, directory: Path) -> int:
    """Tokenize parts until there are no more; returns the exit code."""
    try:
        tokenizer = load_tokenizer(source)
        for line in sys.stdin:
            key, (shards, field, fraction) = json.loads(line)
            part = Part(tuple(Shard(*shard) for shard in shards), field, fraction)
            with told(directory):
                write_tokens(directory, key, partial(write_part, part=part, tokenizer=tokenizer, told=_tell))
            _answer(done=key)
    except DataError as error:
        _answer(error=str(error))
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
