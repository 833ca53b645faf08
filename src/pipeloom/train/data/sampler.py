"""Selects the windows of each batch, as a pure function of the number of samples used so far."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError
from pipeloom.train.data.corpus import Corpus, prepare_corpus

__all__ = ["Corpus", "Sampler", "prepare_corpus"]


class Sampler:
    """Endless shuffled epochs of `num_windows` windows.

    Sample ``n`` is element ``n % num_windows`` of the permutation of epoch ``n // num_windows``, which is determined by
    `seed` and the epoch. The only state is thus the number of samples used so far: a run that resumes from it, with any
    batch size, repeats and skips no sample.

    Raises:
        DataError: there are no windows.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        if num_windows < 1:
            raise DataError(f"num_windows={num_windows}: must be at least 1. Add text.")
        self.num_windows = num_windows
        self.seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)  # two, as a batch may span epochs

    def batch(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """The window numbers of samples ``first_sample ... first_sample + count - 1``; [count]."""
        epoch, offset = divmod(first_sample, self.num_windows)
        pieces = []
        while count > 0:
            pieces.append(self._permutation(epoch)[offset : offset + count])
            count -= len(pieces[-1])
            epoch, offset = epoch + 1, 0
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _permutation_of(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))
        return generator.permutation(self.num_windows).astype(np.int64, copy=False)
