"""`Sampler`: the endless order of samples, and how sources are mixed in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError

_LONGEST_PATTERN = 1 << 14


class Mixture:
    """How many samples come from each of several sources: after any number of samples, each source has its share to
    less than one sample.

    The sources of samples are a pattern that repeats, made by Tijdeman's algorithm for the chairman assignment problem
    (Discrete Mathematics 32, 1980). Weights that have no common denominator up to 16,384 are rounded to it.

    Args:
        sizes: samples per source.
        weights: of the sources, in any unit.

    Attributes:
        pattern: the source of each sample of a period.

    Raises:
        DataError: a weight is not above 0, or a source has no samples.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Fraction | float | int | str]) -> None:
        exact = exact_weights(weights)
        if len(exact) != len(sizes) or not sizes or min(sizes) < 1:
            raise DataError(
                f"weights={list(map(str, weights))} for sources of {list(sizes)} samples: each source needs samples "
                "and a weight. Remove the source, or change its weight."
            )
        self.sizes = tuple(sizes)
        self.shares = _whole_shares(exact)
        self.pattern = _pattern(self.shares)
        self._before = np.zeros(len(self.pattern), np.int64)  # samples of the same source earlier in the pattern
        for source in range(len(sizes)):
            chosen = self.pattern == source
            self._before[chosen] = np.arange(int(chosen.sum()))
        self._shares = np.asarray(self.shares, np.int64)

    def places(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sources of samples ``first ... first + count - 1``, and how many of the source came before each."""
        period, offset = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self.pattern))
        sources = self.pattern[offset]
        return sources, period * self._shares[sources] + self._before[offset]


def exact_weights(weights: Sequence[Fraction | float | int | str]) -> list[Fraction]:
    """The weights of a mixture. Raises DataError if one is not a number above 0."""
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError):  # also infinity, and what is not a number
        exact = []
    if len(exact) < len(weights) or any(weight <= 0 for weight in exact):
        raise DataError(
            f"weights={list(map(str, weights))}: each source needs a weight that is a number above 0. Remove the "
            "source, or change its weight."
        )
    return exact


class Sampler:
    """Endless shuffled epochs of `num_windows` windows.

    Sample ``n`` is element ``n % num_windows`` of the permutation of epoch ``n // num_windows``, which is determined by
    `seed` and the epoch. The only state is thus the number of samples used so far: a run that resumes from it, with any
    batch size, repeats and skips no sample. Samples that are passed over are no part of the order, and not counted.

    Args:
        num_windows: windows of the data.
        seed: of the order.
        passed_over: ranges of positions, (start, stop), of samples that are left out.
        mixture: of sources, whose windows follow each other; each has epochs of its own. None: one source.

    Attributes:
        order: number of windows and seed, which determine the order.
        passed_over: the ranges, merged and ascending.

    Raises:
        DataError: there are no windows.
    """

    def __init__(
        self,
        num_windows: int,
        seed: int,
        passed_over: Iterable[tuple[int, int]] = (),
        mixture: Mixture | None = None,
    ) -> None:
        if num_windows < 1:
            raise DataError(f"num_windows={num_windows}: must be at least 1. Add text.")
        self.num_windows = num_windows
        self.seed = seed
        self.order = num_windows, seed
        self.mixture = mixture
        self._sizes = (num_windows,) if mixture is None else mixture.sizes
        self._starts = np.cumsum([0, *self._sizes])
        self.passed_over: list[tuple[int, int]] = []
        for start, stop in sorted(passed_over):
            if self.passed_over and start <= (last := self.passed_over[-1])[1]:
                self.passed_over[-1] = last[0], max(last[1], stop)
            else:
                self.passed_over.append((start, stop))
        kept = 2 * len(self._sizes)  # two per source, as a batch may span epochs
        self._permutation = lru_cache(maxsize=kept)(self._permutation_of)

    def batch(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """The window numbers of samples ``first_sample ... first_sample + count - 1``; [count]."""
        pieces = [np.empty(0, np.int64)]
        while count > 0:
            position, follow = self.position(first_sample)
            pieces.append(self._windows(position, min(count, follow or count)))
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
        return Sampler(self.num_windows, self.seed, [*self.passed_over, *passed_over], self.mixture)

    def _windows(self, position: int, count: int) -> NDArray[np.int64]:
        if self.mixture is None:
            sources, places = np.zeros(count, np.int64), np.arange(position, position + count, dtype=np.int64)
        else:
            sources, places = self.mixture.places(position, count)
        found = np.empty(count, np.int64)
        for source in np.unique(sources).tolist():
            epochs, offsets = np.divmod(places, self._sizes[source])
            for epoch in np.unique(epochs[sources == source]).tolist():
                chosen = (sources == source) & (epochs == epoch)
                found[chosen] = self._starts[source] + self._permutation(source, epoch)[offsets[chosen]]
        return found

    def _permutation_of(self, source: int, epoch: int) -> NDArray[np.int64]:
        entropy = [self.seed % 2**64, epoch, *([source] if source else [])]
        generator = np.random.Generator(np.random.PCG64(entropy))
        return generator.permutation(self._sizes[source]).astype(np.int64, copy=False)


def _whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Samples of each source per period."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PATTERN:
        return tuple(int(share * period) for share in shares)
    whole = [max(1, int(share * _LONGEST_PATTERN)) for share in shares]
    rests = sorted(range(len(shares)), key=lambda k: whole[k] - shares[k] * _LONGEST_PATTERN)
    for k in range(max(0, _LONGEST_PATTERN - sum(whole))):
        whole[rests[k % len(rests)]] += 1
    return tuple(whole)


def _pattern(shares: Sequence[int]) -> NDArray[np.int64]:
    """The source of each sample of a period: of those that are due, the one whose deadline is first."""
    number, period = len(shares), sum(shares)
    if number == 1:
        return np.zeros(1, np.int64)
    taken, pattern, least = [0] * number, [], 2 * number - 2
    for step in range(1, period + 1):
        late = [least * (step * share - period * taken[k]) for k, share in enumerate(shares)]
        due = [k for k in range(number) if late[k] >= period]
        source = min(due, key=lambda k: (((least - 1) * period - late[k]) / shares[k], k))
        taken[source] += 1
        pattern.append(source)
    return np.asarray(pattern, np.int64)
