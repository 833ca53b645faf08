"""From text to token ids and back: plain bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError

# How tokenizers in the wild call the token that ends a document.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")


class Tokenizer(ABC):
    """Turns documents into token ids, each ended by a separator, and ids back into text."""

    vocabulary_size: int
    dtype: np.dtype[Any]  # the smallest of uint8, uint16, uint32 that holds every id
    fingerprint: bytes  # changes when the ids of a text may change

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> NDArray[Any]:
        """The ids of `texts`, one document after another, a separator after each."""

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

    A document ends with the vocabulary's end-of-text token, or with a line break where there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                f"tokenizer {path}: the tokenizers library is not installed; pip install 'pipeloom[tokenizers]'"
            ) from None
        if path.exists() and not path.is_file() and not path.is_dir():  # read several times, and /dev/zero has no end
            raise DataError(f"tokenizer {path} is a device, a pipe or a socket; give the path of a tokenizer.json")
        try:
            self.fingerprint = path.read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(self.fingerprint.decode())
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}; give the path of a tokenizer.json") from None
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            reason = next(iter(str(error).splitlines()), type(error).__name__)  # a MemoryError says nothing
            raise DataError(f"tokenizer {path} is no tokenizers JSON file ({reason}); give a tokenizer.json") from None
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
    """Bytes for None, else the tokenizer in `file`.

    Raises:
        DataError: the `tokenizers` library is missing, or the file is missing or none of its files.
    """
    return ByteTokenizer() if file is None else FileTokenizer(Path(file))
