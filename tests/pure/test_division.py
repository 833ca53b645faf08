"""Divisors and even parts."""

from pipeloom.common.division import divisors


def test_divisors_of_small_and_large_numbers():
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert divisors(2**40) == [2**power for power in range(41)]
