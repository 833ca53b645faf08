"""`load_tokenizer`: a tokenizer by its path."""

from pathlib import Path

from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a file or a Hugging Face directory, or bytes for None or "".

    Raises:
        DataError: a library is not installed, or there is no valid tokenizer.
    """
    if not path:
        return ByteTokenizer()
    if Path(path).is_dir():
        return PretrainedTokenizer(Path(path))
    return FileTokenizer(Path(path))
