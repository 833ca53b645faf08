"""Documents of JSON lines: tokenized into one memory-mapped file, and packed or padded to samples.

documents   "a b c d e f g"  "p q | r s"  "x | y"         | begins what is scored
packed      a b c d   e f g   p q r s   x y               positions start again with each document
padded      a b c d   e f g . p q r s   x y . .           . is masked
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.common.division import even_parts
from pipeloom.data.corpus import Part
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.shards import Shard, read_lines
from pipeloom.data.token_cache import CheckedTokens, cached_tokens, fits_fraction
from pipeloom.errors import DataError
from pipeloom.train.data.packing import pack
from pipeloom.train.data.records import Document, documents
from pipeloom.train.data.samples import Samples

_FORMAT = 2  # increment when the same files give another file of tokens
_NUMBER = np.dtype(np.int32)
_ABOUT = {**dict.fromkeys(("num_tokens", "num_documents", "num_train_documents", "num_files"), int), "digest": str}
_BLOCK = 1 << 24  # tokens that are looked at together
_IGNORED = -100


class Pieces(NamedTuple):
    """Parts of documents that fit a sample: where each starts, its tokens, and its labels that count."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]


class Documents(Samples):
    """Samples of one document each, or of several that are packed.

    Documents that are scored as a whole are divided where they are too long; others are cut off, because what follows
    would lack its prompt. A first token has no label: nothing before it predicts it.

    Args:
        numbers: ids, ``~id`` where a token is not scored; behind them the length of every document, negative for
            documents that are scored as a whole; training documents first.
        facts: what `prepare_documents` wrote about them.
        tokenizer: of the ids.
        length: most tokens per sample.
        packing: whether a sample has several documents.
        multiple: what the number of tokens of each micro-batch must be a multiple of.
    """

    def __init__(
        self,
        numbers: CheckedTokens,
        facts: dict[str, Any],
        tokenizer: PretrainedTokenizer,
        length: int,
        *,
        packing: bool,
        multiple: int = 1,
    ) -> None:
        self.tokenizer, self._padding = tokenizer, tokenizer.padding
        self._length, self._packing, self._multiple = length, packing, multiple
        self.identity = f"{facts['digest']}:{length}:{packing}"
        count, self._tokens = facts["num_documents"], numbers.cut(0, len(numbers) - facts["num_documents"])
        marked = np.asarray(numbers[len(numbers) - count :], np.int64)
        lengths = np.abs(marked)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if count else lengths
        number = facts["num_train_documents"]
        self.notices, without = [], 0
        self._pieces: dict[Part, Pieces] = {}
        self._packs: dict[Part, list[list[int]]] = {}
        own_of: dict[Part, slice] = {"train": slice(0, number), "validation": slice(number, count)}
        for part, own in own_of.items():
            self._pieces[part], lost = self._cut(starts[own], lengths[own], marked[own] < 0)
            without += lost
            if packing:
                self._packs[part] = pack(self._pieces[part].lengths, length)
        self._tell(lengths, marked < 0, without)
        trained = int(self._pieces["train"].lengths.sum())
        self.found = f"{trained:,} tokens of {number:,} documents"
        if packing:
            self.found += f" packed into {len(self._packs['train']):,} samples"

    def num_samples(self, part: Part = "train") -> int:
        count = len(self._packs[part]) if self._packing else len(self._pieces[part].starts)
        if count < 1:
            fix = "Increase data.validation_fraction, use --eval_steps 0, add" if part == "validation" else "Add"
            raise DataError(
                f"the {part} data has no document with a scored token among its first {self._length}. {fix} documents, "
                "or increase model.sequence_length."
            )
        return count

    def num_tokens(self, indices: ArrayLike, part: Part = "train") -> int:
        return int(self._pieces[part].lengths[self._chosen(indices, part)].sum())

    def num_labels(self, indices: ArrayLike, part: Part = "train") -> int:
        return int(self._pieces[part].labels[self._chosen(indices, part)].sum())

    def largest_id(self) -> int:
        tokens = self._tokens[:]
        return max(int(tokens.max(initial=0)), ~int(tokens.min(initial=0)))

    def batch(self, indices: ArrayLike, num_microbatches: int, part: Part = "train") -> tuple[Any, Any]:
        """Micro-batches of inputs and labels, each as long as its longest sample."""
        from pipeloom.transport.values import MicroBatches

        numbers = np.asarray(indices, np.int64)
        pieces = np.split(numbers, np.cumsum(even_parts(len(numbers), num_microbatches))[:-1])
        made = [self._microbatch(each, part) for each in pieces]
        return MicroBatches(inputs for inputs, _ in made), MicroBatches(targets for _, targets in made)

    # Micro-batches

    def _members(self, sample: int, part: Part) -> Sequence[int]:
        return self._packs[part][sample] if self._packing else [sample]

    def _chosen(self, indices: ArrayLike, part: Part) -> NDArray[np.int64]:
        found = chain.from_iterable(self._members(int(each), part) for each in np.asarray(indices, np.int64))
        return np.fromiter(found, np.int64)

    def _microbatch(self, indices: NDArray[np.int64], part: Part) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        starts, lengths, _ = self._pieces[part]
        rows = [self._members(int(each), part) for each in indices]
        longest = max(int(lengths[row].sum()) for row in rows)
        shape = (len(rows), -(-longest // self._multiple) * self._multiple)
        ids, labels = np.full(shape, self._padding, np.int64), np.full(shape, _IGNORED, np.int64)
        positions, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, members in enumerate(rows):
            end = 0
            for each in members:
                begin, end = end, end + int(lengths[each])
                numbers = np.asarray(self._tokens[starts[each] : starts[each] + lengths[each]], np.int64)
                scored = numbers >= 0
                ids[row, begin:end] = np.where(scored, numbers, ~numbers)
                labels[row, begin:end] = np.where(scored, numbers, _IGNORED)
                labels[row, begin] = _IGNORED
                positions[row, begin:end] = np.arange(end - begin)
            mask[row, :end] = 1
            positions[row, end:] = np.arange(shape[1] - end)
        inputs = {"input_ids": torch.from_numpy(ids)}
        inputs |= (
            {"position_ids": torch.from_numpy(positions)}
            if self._packing
            else {"attention_mask": torch.from_numpy(mask)}
        )
        return inputs, {"labels": torch.from_numpy(labels)}

    # Pieces

    def _cut(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], divides: NDArray[np.bool_]
    ) -> tuple[Pieces, int]:
        """The pieces of documents that have a label, and the number of documents without one."""
        most = self._length
        counts = np.where(divides, -(-lengths // most), 1)
        of = np.repeat(np.arange(len(lengths)), counts)
        offsets = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        begins, sizes = starts[of] + offsets, np.minimum(lengths[of] - offsets, most)
        labels = np.maximum(sizes - 1, 0)
        partly = np.flatnonzero(~divides[of] & (sizes > 1))
        labels[partly] = self._scored(begins[partly] + 1, begins[partly] + sizes[partly])
        kept = labels > 0
        without = len(lengths) - len(np.unique(of[kept]))
        return Pieces(begins[kept], sizes[kept], labels[kept]), without

    def _scored(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """The scored tokens in each of some ascending ranges."""
        found = np.zeros(len(starts), np.int64)
        first = 0
        while first < len(starts):
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + _BLOCK)))
            base = int(starts[first]) - 1
            sums = np.concatenate([[0], np.cumsum(self._tokens[base : ends[last - 1]] >= 0)])
            found[first:last] = sums[ends[first:last] - base] - sums[starts[first:last] - base]
            first = last
        return found

    def _tell(self, lengths: NDArray[np.int64], divides: NDArray[np.bool_], without: int) -> None:
        long = lengths > self._length
        for number, what in (((long & divides).sum(), "divided"), ((long & ~divides).sum(), "cut off")):
            if number:
                self.notices.append(
                    f"{number:,} of {len(lengths):,} documents have more than {self._length} tokens: {what}"
                )
        if without:
            self.notices.append(f"{without:,} documents have no scored token within {self._length} tokens: left out")


# The file of tokens


def prepare_documents(
    files: Sequence[Shard], root: str, tokenizer: PretrainedTokenizer, directory: Path, validation_fraction: float
) -> tuple[CheckedTokens, dict[str, Any]]:
    """The tokens of all documents of some files, and what `Documents` needs to know; made once.

    Args:
        files: JSON lines or Parquet.
        root: what the files are in.
        tokenizer: of the documents.
        directory: of the file of tokens.
        validation_fraction: the fraction of documents for validation, chosen by a hash of their line. If that misses
            the fraction by more than a factor of four, the last documents instead.

    Raises:
        DataError: a line is no document, there is none, or a file cannot be read.
    """
    key = blake2b(tokenizer.fingerprint, digest_size=12)
    key.update(json.dumps(["documents", _FORMAT, validation_fraction, files]).encode())

    def write(out: BinaryIO) -> dict[str, Any]:
        return _write(out, root, files, tokenizer, validation_fraction)

    numbers, facts = cached_tokens(directory, key.hexdigest(), _NUMBER, _ABOUT, write)
    count = facts["num_documents"]
    lengths = np.abs(np.asarray(numbers[max(0, len(numbers) - count) :], np.int64))
    if count + int(lengths.sum()) != len(numbers) or facts["num_train_documents"] > count:
        raise DataError(
            f"the token cache {directory} is damaged: the lengths in corpus-{key.hexdigest()}.bin are not those of its "
            f"{count} documents. Delete this file."
        )
    return numbers, facts


def _write(
    out: BinaryIO, root: str, files: Sequence[Shard], tokenizer: PretrainedTokenizer, fraction: float
) -> dict[str, Any]:
    """Write the training documents, then those of validation, then all lengths; return the JSON about them."""
    by_hash = [0, 0]  # documents: for training, for validation
    for file in files:
        for line in read_lines(file.path):
            by_hash[_is_chosen(line.content, fraction)] += 1
    total = sum(by_hash)
    if not total:
        raise DataError(f"data in {root}: {len(files)} files without a line. Training needs documents: add some.")
    hashed = fits_fraction(by_hash[1], fraction, total)
    num_train = by_hash[0] if hashed else round(total * (1 - fraction))
    lengths: list[int] = []
    digest = blake2b(digest_size=8)
    for wanted in (False, True):
        lines = (line for file in files for line in read_lines(file.path))
        chosen = (
            line
            for number, line in enumerate(lines)
            if (_is_chosen(line.content, fraction) if hashed else number >= num_train) is wanted
        )
        for _, document in documents(chosen, tokenizer):
            numbers = _numbers(document)
            out.write(numbers.data)
            digest.update(numbers.data)
            lengths.append(-len(document.ids) if all(document.scored) else len(document.ids))
    out.write(np.asarray(lengths, _NUMBER).tobytes())
    return {
        "num_tokens": sum(map(abs, lengths)) + len(lengths),
        "num_documents": len(lengths),
        "num_train_documents": num_train,
        "num_files": len(files),
        "digest": digest.hexdigest(),
    }


def _numbers(document: Document) -> NDArray[np.int32]:
    ids = np.asarray(document.ids, _NUMBER)
    return np.where(np.asarray(document.scored, bool), ids, ~ids).astype(_NUMBER)


def _is_chosen(content: bytes, fraction: float) -> bool:
    digest = blake2b(content.strip(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
