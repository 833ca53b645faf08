"""Tokenizers: text to token ids and back."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeloom.errors import DataError

# Common names of the end-of-text token.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")


class Tokenizer(ABC):
    """Converts documents to token ids, and ids to text.

    Attributes:
        vocabulary_size: number of token ids.
        dtype: the smallest unsigned dtype that holds all ids.
        fingerprint: identifies the mapping from text to ids, for caches.
        start, end: the ids in front of a document and behind it.
        source: the file or directory that it was read from; "" for bytes; None if another process cannot read it.
    """

    vocabulary_size: int
    dtype: np.dtype[Any]
    fingerprint: bytes
    start: list[int] = []  # noqa: RUF012  # never changed in place
    end: list[int]
    source: str | None = None

    @abstractmethod
    def plain(self, texts: Sequence[str]) -> Sequence[Any]:
        """The ids of each text, lists or arrays, without those around a document."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that goes on: without `end`; of no text, `end`."""
        return [*self.start, *map(int, self.plain([text])[0])] or list(self.end)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; a NUL byte ends a document."""

    vocabulary_size = 256
    dtype = np.dtype(np.uint8)
    fingerprint = b"bytes"
    end = [0]  # noqa: RUF012
    source = ""

    def plain(self, texts: Sequence[str]) -> Sequence[Any]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).replace(b"\0", b"\n").decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer in the JSON format of the `tokenizers` library.

    A document ends with the end-of-text token of the vocabulary, or with a line break if there is none.

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
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocabulary_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
            ends = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
            end = next((token for token in ends if token is not None), None)
            line_break = self._tokenizer.encode("\n", add_special_tokens=False).ids
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}. Pass the path of a tokenizer.json.") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a bare Exception if it cannot parse the file, or the library's PanicException
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # a MemoryError has no message
            raise DataError(
                f"tokenizer {path} is not a JSON file of the tokenizers library ({reason}). Pass a tokenizer.json."
            ) from None
        self.source = os.path.abspath(path)
        self.dtype = np.min_scalar_type(self.vocabulary_size - 1)
        self.end = line_break if end is None else [end]

    def plain(self, texts: Sequence[str]) -> Sequence[Any]:
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
