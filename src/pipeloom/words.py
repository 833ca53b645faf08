"""Numbers and their nouns, as messages and reports say them."""

from __future__ import annotations


def plural(word: str, count: int) -> str:
    """``layer`` or ``layers``, ``micro-batch`` or ``micro-batches``."""
    return word if count == 1 else word + ("es" if word.endswith("ch") else "s")


def counted(number: int, word: str) -> str:
    """``1 layer``, ``2 layers``, ``2 micro-batches``."""
    return f"{number} {plural(word, number)}"
