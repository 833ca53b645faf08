"""Which windows of a corpus make up which batch, as a pure function of how many were used before."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError
from pipeloom.train.data.corpus import Corpus, prepare_corpus

__all__ = ["Corpus", "Sampler", "prepare_corpus"]


class Sampler:
    """Endless shuffled passes over `num_windows` windows.

    Sample number ``n`` is number ``n % num_windows`` of the permutation of epoch ``n // num_windows``, which follows
    from `seed` and the epoch. The only state of a run is therefore how many samples it has used: resumed there, with
    this batch size or another, it repeats and skips nothing.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        if num_windows < 1:
            raise DataError(f"num_windows={num_windows}: a sampler draws from at least one window; add text")
        self.num_windows = num_windows
        self.seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)  # two: a batch may straddle epochs

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
