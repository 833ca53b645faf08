"""Tokenizes text files into one memory-mapped stream of tokens, and selects the windows of each batch from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.errors import DataError
from pipeloom.train.data.text import Tokenizer, find_files, load_tokenizer
from pipeloom.train.data.token_cache import cached_tokens, facts_of, fits_fraction, unreadable

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal["train", "validation"]

_FORMAT = 2  # increment when the same files give another stream
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation.

    Attributes:
        train: token ids, memory-mapped.
        validation: token ids, memory-mapped.
        tokenizer: the tokenizer of the ids; ``tokenizer.decode`` converts ids to text.
        num_files: number of text files.
        skipped: reason -> number of files skipped.
        divided_by: "file" if validation has whole files, "position" if the files are too few or too unequal for that.
        left_out: skipped directories with output of pipeloom runs.
    """

    train: NDArray[Any]
    validation: NDArray[Any]
    tokenizer: Tokenizer
    num_files: int
    skipped: Mapping[str, int]
    divided_by: str
    left_out: Sequence[Path] = ()

    def num_windows(self, sequence_length: int, part: Part = "train") -> int:
        """The number of disjoint windows of `sequence_length` inputs and their targets.

        Raises:
            DataError: the data is shorter than one window.
        """
        tokens: NDArray[Any] = getattr(self, part)
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

        tokens, count = getattr(self, part), self.num_windows(sequence_length, part)
        chosen = np.asarray(indices, np.int64)
        inputs = tokens[: count * sequence_length].reshape(count, sequence_length)[chosen]
        targets = tokens[1 : count * sequence_length + 1].reshape(count, sequence_length)[chosen]
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))


class Sampler:
    """Endless shuffled epochs of `num_windows` windows.

    Sample ``n`` is element ``n % num_windows`` of the permutation of epoch ``n // num_windows``, which is determined by
    `seed` and the epoch. The only state is thus the number of samples used so far: a run that resumes from it, with any
    batch size, repeats and skips no sample. Samples that are passed over are no part of the order, and not counted.

    Args:
        num_windows: windows of the data.
        seed: of the order.
        passed_over: ranges of positions, (start, stop), of samples that are left out.

    Attributes:
        order: number of windows and seed, which determine the order.
        passed_over: the ranges, merged and ascending.

    Raises:
        DataError: there are no windows.
    """

    def __init__(self, num_windows: int, seed: int, passed_over: Iterable[tuple[int, int]] = ()) -> None:
        if num_windows < 1:
            raise DataError(f"num_windows={num_windows}: must be at least 1. Add text.")
        self.num_windows = num_windows
        self.seed = seed
        self.order = num_windows, seed
        self.passed_over: list[tuple[int, int]] = []
        for start, stop in sorted(passed_over):
            if self.passed_over and start <= (last := self.passed_over[-1])[1]:
                self.passed_over[-1] = last[0], max(last[1], stop)
            else:
                self.passed_over.append((start, stop))
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)  # two, as a batch may span epochs

    def batch(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """The window numbers of samples ``first_sample ... first_sample + count - 1``; [count]."""
        pieces = [np.empty(0, np.int64)]
        while count > 0:
            position, follow = self.position(first_sample)
            epoch, offset = divmod(position, self.num_windows)
            pieces.append(self._permutation(epoch)[offset : offset + min(count, follow or count)])
            first_sample += len(pieces[-1])
            count -= len(pieces[-1])
        return np.concatenate(pieces)

    def position(self, sample: int) -> tuple[int, int | None]:
        """The place of a sample in the order, and how many follow before samples are passed over; None: all."""
        for start, stop in self.passed_over:
            if sample < start:
                return sample, start - sample
            sample += stop - start
        return sample, None

    def without(self, passed_over: Iterable[tuple[int, int]]) -> Sampler:
        """A sampler that passes over these ranges too."""
        return Sampler(self.num_windows, self.seed, [*self.passed_over, *passed_over])

    def _permutation_of(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))
        return generator.permutation(self.num_windows).astype(np.int64, copy=False)


def prepare_corpus(
    path: str | None,
    tokenizer: str | Tokenizer | None,
    directory: Path,
    validation_fraction: float = 0.05,
    *,
    output_dir: Path | None = None,
) -> Corpus:
    """Tokenize text files, cache the tokens in a file, and map it into memory.

    Args:
        path: a directory (all UTF-8 text files below it, without hidden ones), a glob pattern, or a file. None: the
            ``.py`` files of this interpreter's standard library, without its tests and installed packages.
        tokenizer: a tokenizer, or a JSON file of the `tokenizers` library. None: bytes.
        directory: the cache of tokens; reused as long as files, sizes, modification times and tokenizer are the same.
        validation_fraction: the fraction of the text for validation: whole files, chosen by a hash of their relative
            path. If that misses the fraction by more than a factor of four, the end of the stream instead.
        output_dir: the output directory of the run; its files and those of other runs are left out.

    Raises:
        DataError: data or tokenizer is missing, unreadable or empty, or `directory` is not writable.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction}: must be >= 0 and < 1.")
    encoder = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    root, files, passed_over, left_out = find_files(path, directory, output_dir)
    key = blake2b(encoder.fingerprint, digest_size=12)
    key.update(json.dumps([_FORMAT, str(root), validation_fraction, [facts_of(file) for file in files]]).encode())
    tokens, facts = cached_tokens(
        directory,
        key.hexdigest(),
        encoder.dtype,
        lambda out: _write_stream(out, root, files, encoder, validation_fraction),
    )
    return Corpus(
        train=tokens[: facts["num_train_tokens"]],
        validation=tokens[facts["num_train_tokens"] :],
        tokenizer=encoder,
        num_files=facts["num_files"],
        skipped={reason: n for reason, n in {**facts["skipped"], **passed_over}.items() if n},
        divided_by=facts["divided_by"],
        left_out=left_out,
    )


def _read_text(file: Path) -> str | None:
    """The content of `file`, or None if it is not UTF-8 text."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise unreadable(file, error) from None
    return None if "\0" in text else text


def _in_validation(file: Path, root: Path, fraction: float) -> bool:
    name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()
    digest = blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _write_stream(
    out: BinaryIO, root: Path, files: Sequence[Path], tokenizer: Tokenizer, fraction: float
) -> dict[str, Any]:
    """Write the tokens of the training files, then of the validation files; return the JSON that describes them."""
    num_tokens, num_files, counts = 0, 0, []
    skipped = {"not UTF-8 text": 0, "empty": 0}
    for wanted in (False, True):
        texts: list[str] = []
        chosen = [file for file in files if _in_validation(file, root, fraction) is wanted]
        for index, file in enumerate(chosen):
            text = _read_text(file)
            skipped["not UTF-8 text"] += text is None
            skipped["empty"] += text == ""
            if text:
                texts.append(text)
                num_files += 1
            if texts and (index == len(chosen) - 1 or sum(map(len, texts)) > _BATCH_BYTES):
                tokens = tokenizer.encode(texts)
                num_tokens += len(tokens)
                out.write(tokens.tobytes())
                texts.clear()
        counts.append(num_tokens)
    if not num_tokens:
        binary = skipped["not UTF-8 text"]
        content = f"{binary} of them not UTF-8 text, the others empty" if binary else "all empty"
        raise DataError(f"data in {root}: {len(files)} files, {content}. Training needs text: choose other files.")
    num_train, kept = counts[0], num_tokens - counts[0]
    by_file = fits_fraction(kept, fraction, num_tokens)
    return {
        "num_tokens": num_tokens,
        "num_train_tokens": num_train if by_file else round(num_tokens * (1 - fraction)),
        "num_files": num_files,
        "skipped": skipped,
        "divided_by": "file" if by_file else "position",
    }
