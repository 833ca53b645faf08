"""Division: degrees that divide a size, parts of a size, parts of the gradients that ranks exchange."""

from collections.abc import Mapping
from functools import lru_cache
from math import isqrt

PART_BYTES = 1 << 20  # of gradients that ranks with the same parameters exchange at once


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, from 1 up to the number itself."""
    return list(_divisors(number))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return *small, *(number // n for n in reversed(small) if n * n != number)


def even_parts(total: int, num_parts: int) -> list[int]:
    """Divide `total` into `num_parts` integers that differ by at most one, larger ones first."""
    each, remainder = divmod(total, num_parts)
    return [each + 1] * remainder + [each] * (num_parts - remainder)


def gradient_parts(sizes: Mapping[str, float]) -> list[list[str]]:
    """Divide parameters into parts of at most `PART_BYTES` together, by name; a larger one is a part by itself.

    Args:
        sizes: bytes of each, the same on all ranks that hold them.
    """
    parts: list[list[str]] = []
    left = 0.0
    for name, size in sorted(sizes.items()):
        if not parts or size > left:
            parts.append([])
            left = PART_BYTES
        parts[-1].append(name)
        left -= size
    return parts
