"""Numbers and their nouns, as messages and reports say them."""

from __future__ import annotations

import math


def plural(word: str, count: int) -> str:
    """``layer`` or ``layers``, ``micro-batch`` or ``micro-batches``."""
    return word if count == 1 else word + ("es" if word.endswith("ch") else "s")


def counted(number: int, word: str) -> str:
    """``1 layer``, ``2 layers``, ``2 micro-batches``."""
    return f"{number} {plural(word, number)}"


def number_text(value: float) -> str:
    """Four significant digits, thousands apart, no trailing zeros; NaN and infinities by name."""
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
