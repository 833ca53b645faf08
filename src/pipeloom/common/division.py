"""Division of integers: degrees that divide a size, and parts of a size."""

from math import isqrt


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, from 1 up to the number itself."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return [*small, *(number // n for n in reversed(small) if n * n != number)]


def even_parts(total: int, num_parts: int) -> list[int]:
    """Divide `total` into `num_parts` integers that differ by at most one, larger ones first."""
    each, remainder = divmod(total, num_parts)
    return [each + 1] * remainder + [each] * (num_parts - remainder)
