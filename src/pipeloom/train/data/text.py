"""The text of a run: the files of its data path, without output of pipeloom runs, and the tokenizer that reads them."""

import glob
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.process_place import PROCESSES_NAME
from pipeloom.errors import DataError
from pipeloom.train.checkpoint.manifest import SEAL_NAME

# Common names of the end-of-text token.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")

CONFIG_HEAD = "# pipeloom "  # the first characters of config.yaml in an output directory

MODEL_DIR = "model"  # of a fine-tuned model, in an output directory

# What a run writes. An output directory may also have text files of the user.
PLAN_NAME, PLAN_TIMES_NAME = "plan.json", "plan_times.json"
REWINDS_NAME = "rewinds.json"
RUN_FILES = (
    *(PLAN_NAME, PLAN_TIMES_NAME),
    *("metrics.jsonl", "config.yaml", "environment.json", "memory.json", "report.html", PROCESSES_NAME),
    *("timelines.json", "timeline.json.gz", "tracking.json", "tensorboard", REWINDS_NAME),
    MODEL_DIR,
)
_WRITTEN = re.compile(f"{'|'.join(map(re.escape, RUN_FILES))}|data|checkpoint-\\d+|previous-\\d+")
_TOKENS = re.compile(r"corpus-[0-9a-f]{24}\.(bin|json)")

# Directories of the standard library without library code: tests and installed packages.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_files(
    path: str | None, tokens_dir: Path, output_dir: Path | None
) -> tuple[Path, Sequence[Path], dict[str, int], Sequence[Path]]:
    """Find the files of `path`: a directory, a glob pattern, a file, or None for the standard library.

    Leaves out `tokens_dir`, `output_dir` and the output directories of other runs, recognized by their config.yaml. If
    `path` is inside such a directory, only the files that runs write are left out.

    Returns:
        The base of relative paths, the files in a fixed order, reason -> number of files skipped, and the skipped
        directories below the base with output of runs.

    Raises:
        DataError: data is missing or unreadable, or all files are left out.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return root, [f for f in _walk(root, _STDLIB_SKIPPED) if f.suffix == ".py" and f.is_file()], {}, ()
    root = Path(path).expanduser()
    if root.is_dir():
        files = list(_walk(root))
    elif root.is_file():
        root, files = root.parent, [root]
    elif root.exists():
        raise DataError(f"data path {path!r} is a device, a pipe or a socket: must be a directory or file.")
    elif glob.has_magic(path):
        files = sorted(match for match in map(Path, glob.glob(str(root), recursive=True)) if not match.is_dir())
        root = Path(*takewhile(lambda part: not glob.has_magic(part), root.parts))
    else:
        raise DataError(f"data path {path!r} does not exist: must be a directory, a glob pattern or a file.")
    writer = _writer(root, tokens_dir, output_dir)
    writers: dict[Path, Path | None] = {}
    passed_over = {"broken link": 0, "no regular file": 0}
    for file in files:
        if file.is_file():  # reading a pipe or device may not terminate
            writers[file] = writer(file)
        else:
            passed_over["no regular file" if file.exists() else "broken link"] += 1
    files = [file for file in files if file in writers and writers[file] is None]
    if writers and not files:
        raise DataError(
            f"data path {path!r}: its {len(writers)} files are in {next(iter(writers.values()))}, a directory for the "
            "output of a run, which is not read. Use another output_dir, or move the text."
        )
    if not files:
        raise DataError(f"data path {path!r} has no files. Training needs text: choose another path.")
    return root, files, passed_over, sorted({place for place in writers.values() if place is not None})


def _writer(root: Path, tokens_dir: Path, output_dir: Path | None) -> Callable[[Path], Path | None]:
    """A function that returns the directory of the run that wrote a file, or None."""
    real_root, real_tokens_dir = root.resolve(), tokens_dir.resolve()
    real_output_dir = output_dir and output_dir.resolve()
    is_output = cache(_is_output)

    def is_written(file: Path, place: Path, root: Path) -> bool:
        """Whether the run in `place` wrote `file`; decided by the name if `root` is inside `place`."""
        if not file.is_relative_to(place):
            return False
        return not root.is_relative_to(place) or bool(_WRITTEN.fullmatch(file.relative_to(place).parts[0]))

    def writer(file: Path) -> Path | None:
        real = file.resolve()
        if real_output_dir is not None and is_written(real, real_output_dir, real_root):
            return output_dir
        if real.is_relative_to(real_tokens_dir):
            return tokens_dir
        places = [place for place in reversed(file.parents) if place.is_relative_to(root)]
        of_runs = (place for place in places if is_output(place) and is_written(file, place, root))
        return next(of_runs, file.parent if _TOKENS.fullmatch(file.name) else None)

    return writer


def _is_output(directory: Path) -> bool:
    """Whether a directory is an output directory or a checkpoint of pipeloom."""
    try:
        with open(directory / "config.yaml", encoding="utf-8", errors="replace") as file:
            if file.read(len(CONFIG_HEAD)) == CONFIG_HEAD:
                return True
    except OSError:
        pass
    return (directory / SEAL_NAME).is_file()


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise DataError(
            f"data directory {error.filename}: {error.strerror}. Make it readable, or choose another."
        ) from None

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


# Tokenizers


class Tokenizer(ABC):
    """Converts documents to token ids, with a separator after each, and ids to text.

    Attributes:
        vocabulary_size: number of token ids.
        dtype: the smallest unsigned dtype that holds all ids.
        fingerprint: identifies the mapping from text to ids, for caches.
    """

    vocabulary_size: int
    dtype: np.dtype[Any]
    fingerprint: bytes

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        """The ids of all `texts`, concatenated, with a separator after each."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that goes on: without a separator behind it; of no text, a separator."""
        separator: list[int] = self.encode([""]).tolist()
        tokens: list[int] = self.encode([text]).tolist()
        return tokens[: -len(separator)] or separator


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; a NUL byte ends a document."""

    vocabulary_size = 256
    dtype = np.dtype(np.uint8)
    fingerprint = b"bytes"

    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        return np.frombuffer(b"".join(text.encode() + b"\0" for text in texts), np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).replace(b"\0", b"\n").decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer in the JSON format of the `tokenizers` library.

    The separator is the end-of-text token of the vocabulary, or a line break if there is none.

    Raises:
        DataError: the library is not installed, or the file is missing or invalid.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                f"tokenizer {path}: the tokenizers library is not installed. Run pip install 'pipeloom[tokenizers]'."
            ) from None
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe reads once, /dev/zero never ends
            raise DataError(f"tokenizer {path} is a device, a pipe or a socket. Pass the path of a tokenizer.json.")
        try:
            self.fingerprint = path.read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(self.fingerprint.decode())
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}. Pass the path of a tokenizer.json.") from None
        except Exception as error:  # the library raises a bare Exception if it cannot parse the file
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # a MemoryError has no message
            raise DataError(
                f"tokenizer {path} is not a JSON file of the tokenizers library ({reason}). Pass a tokenizer.json."
            ) from None
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        self.dtype = np.min_scalar_type(self.vocabulary_size - 1)
        ends = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        end = next((token for token in ends if token is not None), None)
        line_break = self._tokenizer.encode("\n", add_special_tokens=False).ids
        self._end: list[int] = line_break if end is None else [end]

    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        pieces = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return np.concatenate([np.asarray([*piece.ids, *self._end], self.dtype) for piece in pieces])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(file: str | None) -> Tokenizer:
    """The tokenizer in `file`, or bytes for None; raises as `FileTokenizer`."""
    return ByteTokenizer() if file is None else FileTokenizer(Path(file))
