"""Text as a stream of tokens, memory-mapped, and the windows of each batch from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.data.datasets import Records, rows_of
from pipeloom.data.files import Found, Writer, find_files
from pipeloom.data.parts import PART_BYTES, Joined, Read, parts_of
from pipeloom.data.sampler import Mixture, Sampler, exact_weights
from pipeloom.data.token_cache import fits_fraction
from pipeloom.data.tokenizer_files import load_tokenizer
from pipeloom.data.tokenizers import Tokenizer
from pipeloom.data.tokenizing import tokenize
from pipeloom.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal["train", "validation"]


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation.

    Attributes:
        train: token ids, memory-mapped; slices of it are arrays.
        validation: token ids, memory-mapped.
        tokenizer: the tokenizer of the ids; ``tokenizer.decode`` converts ids to text.
        num_files: number of files with text.
        skipped: reason -> number of files skipped.
        divided_by: "document" if validation has whole documents, "position" if they are too few or unequal for that.
        identity: changes with the tokens.
        left_out: skipped directories with output of pipeloom runs.
    """

    train: Joined
    validation: Joined
    tokenizer: Tokenizer
    num_files: int
    skipped: Mapping[str, int]
    divided_by: str
    identity: str = ""
    left_out: Sequence[Path] = ()

    def num_windows(self, sequence_length: int, part: Part = "train") -> int:
        """The number of disjoint windows of `sequence_length` inputs and their targets.

        Raises:
            DataError: the data is shorter than one window.
        """
        tokens: Joined = getattr(self, part)
        count = (len(tokens) - 1) // sequence_length
        if count < 1:
            fix = "Increase data.validation_fraction, use --eval_steps 0, add" if part == "validation" else "Add"
            raise DataError(
                f"the {part} data has {len(tokens)} tokens: one window needs {sequence_length + 1} (sequence_length + "
                f"1). {fix} text, or decrease sequence_length."
            )
        return count

    def windows(self, indices: ArrayLike, sequence_length: int, part: Part = "train") -> tuple[Tensor, Tensor]:
        """Windows by number -> (inputs [B, S], targets [B, S]), int64; targets are the inputs shifted by one token."""
        import torch  # imported here: preparing and checking data needs no torch

        tokens: Joined = getattr(self, part)
        count = self.num_windows(sequence_length, part)
        found = np.empty((len(np.asarray(indices)), sequence_length + 1), np.int64)
        for row, index in enumerate(np.asarray(indices, np.int64).tolist()):
            if not 0 <= index < count:
                raise IndexError(f"window {index} of {count}")
            found[row] = tokens[index * sequence_length : (index + 1) * sequence_length + 1]
        whole = torch.from_numpy(found)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def sampler(self, sequence_length: int, seed: int) -> Sampler:
        """The endless order of the training windows."""
        return Sampler(self.num_windows(sequence_length), seed)


class MixedCorpus:
    """Corpora whose windows are mixed by weights.

    Windows are numbered through: those of the first corpus come first.

    Args:
        corpora: with tokenizers that have the same ids.
        weights: shares of the samples, in any unit.

    Attributes:
        corpora, weights: as given.
        tokenizer: of all corpora.
        identity: changes with the tokens and the weights.

    Raises:
        DataError: the tokenizers differ, or there is not one weight above 0 per corpus.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[Fraction | float | str]) -> None:
        if not corpora or len(weights) != len(corpora):
            raise DataError(
                f"weights={list(map(str, weights))} for {len(corpora)} corpora: there must be one per corpus, and at "
                "least one corpus."
            )
        exact_weights(weights)
        self.corpora, self.weights, self.tokenizer = corpora, list(weights), corpora[0].tokenizer
        parts = [f"{corpus.identity}*{weight}" for corpus, weight in zip(corpora, weights, strict=True)]
        self.identity = blake2b(":".join(parts).encode(), digest_size=8).hexdigest()
        if any(corpus.tokenizer.fingerprint != self.tokenizer.fingerprint for corpus in corpora):
            raise DataError("corpora have different tokenizers: their ids must mean the same. Use one tokenizer.")

    def num_windows(self, sequence_length: int, part: Part = "train") -> int:
        """The number of windows of all corpora; see `Corpus.num_windows`."""
        return sum(self._sizes(sequence_length, part))

    def windows(self, indices: ArrayLike, sequence_length: int, part: Part = "train") -> tuple[Tensor, Tensor]:
        """Windows by their numbers in all corpora, one corpus after another; see `Corpus.windows`."""
        import torch

        starts = np.cumsum([0, *self._sizes(sequence_length, part)])
        numbers = np.asarray(indices, np.int64)
        places = np.searchsorted(starts, numbers, side="right") - 1
        found = torch.empty(2, len(numbers), sequence_length, dtype=torch.int64)
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place)
            own = self.corpora[place].windows(numbers[rows] - starts[place], sequence_length, part)
            found[:, torch.from_numpy(rows)] = torch.stack(own)
        return found[0], found[1]

    def sampler(self, sequence_length: int, seed: int) -> Sampler:
        """The endless order of the training windows, mixed by weights."""
        return Sampler(self.num_windows(sequence_length), seed, mixture=self.mixture(sequence_length))

    def mixture(self, sequence_length: int) -> Mixture:
        """How training windows are mixed."""
        return Mixture(self._sizes(sequence_length, "train"), self.weights)

    def validation_order(self, sequence_length: int, count: int) -> NDArray[np.int64]:
        """The numbers of `count` validation windows, in shares of about the weights while all corpora have some."""
        sizes = self._sizes(sequence_length, "validation")
        starts = np.cumsum([0, *sizes])
        orders = [np.arange(min(size, count)) for size in sizes]
        turns = [(order + 1) / float(Fraction(str(w))) for order, w in zip(orders, self.weights, strict=True)]
        numbers = np.concatenate([start + order for start, order in zip(starts, orders, strict=False)])
        found: NDArray[np.int64] = numbers[np.argsort(np.concatenate(turns), kind="stable")][:count]
        return found

    def _sizes(self, sequence_length: int, part: Part) -> list[int]:
        sizes = []
        for number, corpus in enumerate(self.corpora, start=1):
            try:
                sizes.append(corpus.num_windows(sequence_length, part))
            except DataError as error:
                raise DataError(f"source {number} of the mixture: {error}") from None
        return sizes


def prepare_corpus(
    source: str | Path | Records | None,
    tokenizer: str | Tokenizer | None,
    directory: str | Path,
    validation_fraction: float = 0.05,
    *,
    field: str = "text",
    version: str | None = None,
    workers: int | None = None,
    shows: bool = True,
    writer_in: Callable[[Path], Writer] | None = None,
    part_bytes: int = PART_BYTES,
) -> Corpus:
    """Tokenize text, cache the tokens in files, and map them into memory.

    ``.jsonl`` files, also ``.jsonl.gz`` and ``.jsonl.zst``, have a document per line, ``.parquet`` files one per row.
    Others are a document each, if they are UTF-8 text.

    Args:
        source: a directory (all files below it, without hidden ones), a glob pattern, a file, or a URL of `fsspec` of
            any of them; a `datasets.Dataset`; or an iterable of records, which gives the same records each time. None:
            the ``.py`` files of this interpreter's standard library, without its tests and installed packages.
        tokenizer: a tokenizer, a JSON file of the `tokenizers` library, or a Hugging Face directory. None: bytes.
        directory: the cache of tokens; reused as long as files, sizes, modification times and tokenizer are the same.
        validation_fraction: the fraction of the documents for validation, chosen by a hash: of the text of a line or
            row, of the relative path of a file. If that misses the fraction by more than a factor of four, the end of
            the stream instead.
        field: the key or the column of the text.
        version: of an iterable: a text that changes with its content.
        workers: most processes that tokenize; None: one per core.
        shows: whether progress is shown.
        writer_in: from the base directory, what tells which files runs have written: they are left out.
        part_bytes: small files are tokenized together up to this size.

    Raises:
        DataError: data or tokenizer is missing, unreadable or empty, or `directory` is not writable.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction}: must be >= 0 and < 1.")
    encoder = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    read: Read | None = None
    if source is None or isinstance(source, str | Path):
        files = find_files(None if source is None else str(source), Path(directory), writer_in)
    else:
        shards, read = rows_of(source, version)
        files = Found(type(source).__name__, shards, {}, ())
    parts = parts_of(files.shards, field, validation_fraction, part_bytes)
    found = tokenize(parts, encoder, Path(directory), workers=workers, shows=shows, read=read)
    facts = [each for _, each in found]
    trains = [tokens.cut(0, each["num_train_tokens"]) for tokens, each in found]
    rests = [tokens.cut(each["num_train_tokens"], len(tokens)) for tokens, each in found]
    stream = Joined([*trains, *rests], encoder.dtype)
    skipped = {name: sum(each["skipped"][name] for each in facts) for name in ("not UTF-8 text", "empty")}
    if not len(stream):
        binary = skipped["not UTF-8 text"]
        content = f"{binary} of them not UTF-8 text, the others empty" if binary else "all empty"
        raise DataError(
            f"data in {files.root}: {len(files.shards)} files, {content}. Training needs text: choose other files."
        )
    number, kept = len(stream), sum(map(len, rests))
    by_document = fits_fraction(kept, validation_fraction, number)
    num_train = number - kept if by_document else round(number * (1 - validation_fraction))
    identity = blake2b(":".join([str(num_train), *(each["digest"] for each in facts)]).encode(), digest_size=8)
    return Corpus(
        train=stream.cut(0, num_train),
        validation=stream.cut(num_train, number),
        tokenizer=encoder,
        num_files=sum(each["num_files"] for each in facts),
        skipped={reason: n for reason, n in {**skipped, **files.passed_over}.items() if n},
        divided_by="document" if by_document else "position",
        identity=identity.hexdigest(),
        left_out=files.left_out,
    )
