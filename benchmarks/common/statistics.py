"""Medians and quartiles of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    first_quartile: float
    third_quartile: float

    def show(self, pattern: str = "{:.2f}", scale: float = 1.0) -> Cell:
        """The cell of a table: median and quartiles times `scale`, each formatted by `pattern`."""
        scaled = Spread(*(value * scale for value in self))
        middle, low, high = map(pattern.format, scaled)
        return Cell(f"{middle} ({low}-{high})", scaled)


@dataclass(frozen=True)
class Cell:
    """A cell of a table that keeps the numbers behind its text."""

    text: str
    spread: Spread

    def __str__(self) -> str:
        return self.text


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of `values`, of which there may be one."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the ratios of values measured in the same round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
