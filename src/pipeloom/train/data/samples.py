"""`Samples`: what a step takes from a corpus, by number: windows of text, or documents."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.train.data.corpus import Corpus, Part
from pipeloom.train.data.text import Tokenizer


class Samples(ABC):
    """The samples of a run.

    Attributes:
        tokenizer: of their tokens.
        found: ``12,345 tokens of 3 files``.
        notices: lines to show before the first step.
    """

    tokenizer: Tokenizer
    found: str
    notices: list[str]

    @abstractmethod
    def num_samples(self, part: Part = "train") -> int:
        """Their number. Raises DataError if there are none."""

    @abstractmethod
    def batch(self, indices: ArrayLike, num_microbatches: int, part: Part = "train") -> tuple[Any, Any]:
        """Inputs and targets of some samples, as `Pipeline.step` takes them, on the CPU."""

    @abstractmethod
    def num_tokens(self, indices: ArrayLike, part: Part = "train") -> int:
        """The tokens of some samples, without padding."""

    @abstractmethod
    def num_labels(self, indices: ArrayLike, part: Part = "train") -> int:
        """The tokens of some samples that count in the loss."""

    @abstractmethod
    def largest_id(self) -> int:
        """The largest token id of all samples."""

    def validation_batches(self, batch_size: int, num_batches: int) -> Iterator[NDArray[np.int64]]:
        """The numbers of the samples of each validation batch: the first `num_batches`, or fewer if there are fewer.

        All batches are full, except for a single smaller one if the data is shorter than a batch.
        """
        count = self.num_samples("validation")
        for batch in range(min(num_batches, max(1, count // batch_size))):
            yield np.arange(batch * batch_size, min((batch + 1) * batch_size, count))


class Windows(Samples):
    """Windows of a stream of text, all of the same length.

    Args:
        corpus: the stream.
        length: tokens per window.
        labelled: whether inputs and targets are those of a model that computes its own loss from labels: token ids, and
            the same again. Else ids, and ids shifted by one.
        found, notices: see `Samples`.
    """

    def __init__(self, corpus: Corpus, length: int, *, labelled: bool, found: str, notices: list[str]) -> None:
        self.corpus, self.tokenizer, self.found, self.notices = corpus, corpus.tokenizer, found, notices
        self._length, self._labelled = length, labelled

    def num_samples(self, part: Part = "train") -> int:
        return self.corpus.num_windows(self._length, part)

    def batch(self, indices: ArrayLike, num_microbatches: int, part: Part = "train") -> tuple[Any, Any]:
        inputs, targets = self.corpus.windows(indices, self._length, part)
        return ({"input_ids": inputs}, {"labels": inputs}) if self._labelled else (inputs, targets)

    def num_tokens(self, indices: ArrayLike, part: Part = "train") -> int:
        return len(np.asarray(indices)) * self._length

    def num_labels(self, indices: ArrayLike, part: Part = "train") -> int:
        return len(np.asarray(indices)) * (self._length - int(self._labelled))

    def largest_id(self) -> int:
        return max(int(part.max(initial=0)) for part in (self.corpus.train, self.corpus.validation))
