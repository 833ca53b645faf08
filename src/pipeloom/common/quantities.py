"""Formats numbers and tables for messages and reports, and parses the sizes and bandwidths of options."""

import math
import re
from collections.abc import Container, Sequence
from decimal import Decimal
from typing import Self

from pipeloom.errors import InputError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class Bytes(int):
    """A number of bytes in an option: ``Bytes.parse("1.5GiB")`` is 1610612736, written ``1536MiB``."""

    __slots__ = ()

    @classmethod
    def parse(cls, given: object) -> Self:
        """Parse a number (``8e9``) or a string with a unit (``16GB``, ``16GiB``); fractions of a byte are dropped.

        Raises:
            InputError: `given` is not a number of bytes.
        """
        found = _amount(given, r"(?:E\+?\d{1,2})?")
        if found is None or 0 < found < 1:
            raise InputError(f"{given} is not a number of bytes. Use a form such as 8e9, 16GB or 16GiB.")
        return cls(found)

    @property
    def written(self) -> str | int:
        """The value for YAML, with the largest binary unit that divides it; `parse` reads it back."""
        for unit in ("TI", "GI", "MI", "KI"):
            count, rest = divmod(int(self), _UNITS[unit])
            if 0 < count < 10_000 and not rest:
                return f"{count}{unit[0]}iB"
        return int(self)

    def __str__(self) -> str:
        return str(self.written)


class BytesPerSecond(float):
    """A bandwidth in an option: ``BytesPerSecond.parse("12GB")`` and ``parse("12GB/s")`` are 12e9."""

    __slots__ = ()

    @classmethod
    def parse(cls, given: object) -> Self:
        """Parse a number (``1.25e9``) or a string with a unit.

        Raises:
            InputError: `given` is not a number of bytes per second.
        """
        found = _amount(str(given).strip().removesuffix("/s"), r"(?:E[+-]?\d{1,3})?")
        if found is None or not math.isfinite(float(found)):
            raise InputError(f"{given} is not a number of bytes per second. Use a form such as 1.25e9, 12GB or 100MiB.")
        return cls(found)


def _amount(given: object, exponent: str) -> Decimal | None:
    """The number of bytes in `given`, with or without a unit; None if it does not parse."""
    plain = str(given).strip().upper()
    match = re.fullmatch(rf"(\d{{1,30}}(?:\.\d{{0,30}})?{exponent})\s*([KMGT]?I?)B?", plain, re.ASCII)
    return None if match is None or match[2] not in _UNITS else Decimal(match[1]) * _UNITS[match[2]]


def plural(word: str, count: int) -> str:
    """``layer`` or ``layers``, ``micro-batch`` or ``micro-batches``."""
    return word if count == 1 else word + ("es" if word.endswith("ch") else "s")


def counted(number: int, word: str) -> str:
    """``1 layer``, ``2 layers``, ``2 micro-batches``."""
    return f"{number} {plural(word, number)}"


def number_text(value: float) -> str:
    """Four significant digits with thousands separators and without trailing zeros; ``NaN``, ``∞``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_text(count: float) -> str:
    """``3 * 2**20`` -> ``"3 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{number_text(count)} {unit}"
        count /= 1024
    return f"{number_text(count)} TiB"


def percent_text(fraction: float) -> str:
    """``0.2727`` -> ``"27.3 %"``."""
    return f"{100 * fraction:.1f} %"


def seconds_text(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{number_text(seconds * factor)} {unit}"
    return f"{number_text(seconds * 1e6)} µs" if seconds else "0 s"


def table_lines(rows: Sequence[Sequence[str]], left: Container[int] | None = None) -> list[str]:
    """`rows` of cells as lines with aligned columns: the columns `left` to the left (None: all), the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
