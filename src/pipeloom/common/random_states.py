"""`RandomStates`: states of Python's and numpy's global random generators, which torch neither saves nor restores."""

import ctypes
import random
import threading
from typing import Any, NamedTuple, Self

import numpy as np

_KEY_BYTES = 624 * 4  # of the Mersenne Twister, in front of the position in them


class _Thread(threading.local):
    shares_process = False


thread = _Thread()  # set `shares_process` in threads that are ranks: they draw from the same generators


class RandomStates(NamedTuple):
    """States that compare and can be restored.

    Attributes:
        python: of `random`.
        numpy: of `numpy.random`: name, keys as bytes, position, and a number of a pair that was kept.
    """

    python: Any
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls, *, quickly: bool = False) -> Self:
        """The states of this process.

        Args:
            quickly: 17 us instead of 75 us, without the second number of numpy's last pair of normal ones.
        """
        generator: Any = np.random.mtrand.get_bit_generator() if quickly else None
        if isinstance(generator, np.random.MT19937):
            memory = ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES + 4)
            position = int.from_bytes(memory[_KEY_BYTES:], "little", signed=True)
            return cls(random.getstate(), ("MT19937", memory[:_KEY_BYTES], position, 0, 0.0))
        return cls(random.getstate(), _comparable(np.random.get_state()))

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """The states that follow from a seed of 64 bits; those of the process stay."""
        return cls(random.Random(seed).getstate(), _comparable(np.random.RandomState(seed % 2**32).get_state()))

    def restore(self) -> None:
        """Set the states of the process."""
        random.setstate(self.python)
        if self.numpy:
            name, keys, *rest = self.numpy
            np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _comparable(state: Any) -> tuple[Any, ...]:
    """A state of numpy; empty where the Mersenne Twister was replaced."""
    if isinstance(state, dict):
        return ()
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)
