"""Tokenizers: UTF-8 bytes, or a JSON file of the `tokenizers` library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError

# Common names of the end-of-text token.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")


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
