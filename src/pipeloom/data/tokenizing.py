"""`tokenize`: makes the files of tokens that are missing, by several processes."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from pipeloom.common.cores import usable_cores
from pipeloom.data.parts import ABOUT, Part, Read, Told, write_part
from pipeloom.data.progress import tokenizing
from pipeloom.data.shards import Shard, read_texts
from pipeloom.data.token_cache import CheckedTokens, only_writer, open_tokens, read_about, told, write_tokens
from pipeloom.data.tokenizers import Tokenizer
from pipeloom.errors import DataError

Missing = list[tuple[Part, str]]  # parts and their keys


def tokenize(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    workers: int | None = None,
    shows: bool = True,
    read: Read | None = None,
) -> list[tuple[CheckedTokens, dict[str, Any]]]:
    """The tokens of parts, memory-mapped, and the JSON that describes them.

    Args:
        parts: of shards.
        tokenizer: of their text.
        directory: the cache of tokens; made if missing.
        workers: most processes that tokenize; None: one per core.
        shows: whether progress is shown.
        read: the documents of a shard; this process reads them. None: those of a file.

    Raises:
        DataError: a shard cannot be read, the cache cannot be written, or a process that tokenizes has died.
    """
    keys = [part.key(tokenizer) for part in parts]

    def missing() -> Missing:
        found = zip(parts, keys, strict=True)
        return [(part, key) for part, key in found if read_about(directory, key, tokenizer.dtype, ABOUT) is None]

    with told(directory):
        if missing():
            with only_writer(directory):
                todo = missing()
                total, left = (sum(part.num_bytes for part in each) for each in (parts, [part for part, _ in todo]))
                with tokenizing(total, total - left, shows=shows) as tell:
                    _make(todo, tokenizer, directory, workers or usable_cores(), tell, read)
    return [open_tokens(directory, key, tokenizer.dtype, ABOUT) for key in keys]


def _make(todo: Missing, tokenizer: Tokenizer, directory: Path, workers: int, tell: Told, read: Read | None) -> None:
    workers = min(workers, len(todo))
    if workers > 1 and tokenizer.source is not None:
        _share(todo, tokenizer.source, directory, workers, tell, read)
        return
    for part, key in todo:
        write_tokens(directory, key, _writer(part, tokenizer, tell, read or read_texts))


def _writer(part: Part, tokenizer: Tokenizer, tell: Told, read: Read) -> Callable[[BinaryIO], dict[str, Any]]:
    return lambda out: write_part(out, part, tokenizer, tell, read)


# Several processes. Each is sent parts, one per line, and answers with lines.


def _share(todo: Missing, source: str, directory: Path, workers: int, tell: Told, read: Read | None) -> None:
    """Tokenize parts by `workers` processes; the largest parts come first."""
    queue: SimpleQueue[tuple[Part, str]] = SimpleQueue()
    for each in sorted(todo, key=lambda each: -each[0].num_bytes):
        queue.put(each)
    lock = threading.Lock()

    def tell_one_by_one(num_bytes: int, num_tokens: int) -> None:
        with lock:
            tell(num_bytes, num_tokens)

    processes = [_start(source, directory) for _ in range(workers)]
    try:
        with ThreadPoolExecutor(workers) as threads:
            ends = [threads.submit(_follow, process, queue, tell_one_by_one, directory, read) for process in processes]
            try:
                done, _ = wait(ends, return_when=FIRST_EXCEPTION)
                for end in done:
                    end.result()
            except BaseException:
                for process in processes:  # their threads then end too
                    process.kill()
                raise
    finally:
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()


def _start(source: str, directory: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "pipeloom.data.worker", source, str(directory)]
    path = os.pathsep.join(each for each in sys.path if each)  # as in this process, however it was started
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _follow(
    process: "subprocess.Popen[str]",
    queue: "SimpleQueue[tuple[Part, str]]",
    tell: Told,
    directory: Path,
    read: Read | None,
) -> None:
    while True:
        try:
            part, key = queue.get_nowait()
        except Empty:
            return
        if read is None:
            _send(process, part, key, [], tell)
            continue
        with ExitStack() as files:
            rows = [files.enter_context(_written(shard, part.field, directory, read)) for shard in part.shards]
            _send(process, part, key, rows, tell)


@contextmanager
def _written(shard: Shard, field: str, directory: Path, read: Read) -> Iterator[str]:
    """The documents of a shard as JSON lines in a file without a name, which others open by this path."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=directory) as file:
        pieces: list[str] = []
        for text in read(shard, field):
            assert text is not None  # records have text
            pieces.append(text.text)
            if text.ends:
                file.write(json.dumps({field: "".join(pieces)}) + "\n")
                pieces.clear()
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _send(process: "subprocess.Popen[str]", part: Part, key: str, rows: Sequence[str], tell: Told) -> None:
    """Have a process tokenize a part; `rows` has files with the documents of its shards, if these are no files."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([key, part, rows]) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _died(process, part) from None
    for line in process.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        if "done" in answer:
            return
        tell(answer["bytes"], answer["tokens"])
    raise _died(process, part)


def _died(process: "subprocess.Popen[str]", part: Part) -> DataError:
    code = process.wait()
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    return DataError(
        f"a process that tokenized {part.shards[0].path} died ({reason}), perhaps for lack of memory. Lower "
        "data.workers."
    )
