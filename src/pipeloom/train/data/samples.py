"""`Samples`: what a step takes from a corpus, by number: windows of text, or documents."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.data.corpus import Corpus, MixedCorpus, Part
from pipeloom.data.sampler import Mixture
from pipeloom.data.tokenizers import Tokenizer


class Samples(ABC):
    """The samples of a run.

    Attributes:
        tokenizer: of their tokens.
        found: ``12,345 tokens of 3 files``.
        notices: lines to show before the first step.
        identity: changes with the samples.
        mixture: of sources, whose training samples follow each other; None: one source.
    """

    tokenizer: Tokenizer
    found: str
    notices: list[str]
    identity: str
    mixture: Mixture | None = None

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
        number = min(num_batches, max(1, count // batch_size))
        order = self.validation_order(min(number * batch_size, count))
        for batch in range(number):
            yield order[batch * batch_size : (batch + 1) * batch_size]

    def validation_order(self, count: int) -> NDArray[np.int64]:
        """The numbers of the first `count` validation samples."""
        return np.arange(count)


class Windows(Samples):
    """Windows of a stream of text, all of the same length.

    Args:
        corpus: the stream, or several that are mixed.
        length: tokens per window.
        labelled: whether inputs and targets are those of a model that computes its own loss from labels: token ids, and
            the same again. Else ids, and ids shifted by one.
        found, notices: see `Samples`.
    """

    def __init__(
        self, corpus: Corpus | MixedCorpus, length: int, *, labelled: bool, found: str, notices: list[str]
    ) -> None:
        self.corpus, self.tokenizer, self.found, self.notices = corpus, corpus.tokenizer, found, notices
        self._length, self._labelled = length, labelled
        self.identity = corpus.identity
        self.mixture = corpus.mixture(length) if isinstance(corpus, MixedCorpus) else None

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
        corpora = self.corpus.corpora if isinstance(self.corpus, MixedCorpus) else [self.corpus]
        return max(part.max() for corpus in corpora for part in (corpus.train, corpus.validation))

    def validation_order(self, count: int) -> NDArray[np.int64]:
        if isinstance(self.corpus, MixedCorpus):
            return self.corpus.validation_order(self._length, count)
        return super().validation_order(count)
