"""`Order`: one rank's actions as integers, for schedules of millions of actions.

An action of an `Order` is one integer of 63 bits, so a range of micro-batches is a range of integers:

    | op, 5 bits | stage, 20 | micro-batch + 1, 22 | slice + 1, 16 |        0 in a field of + 1 stands for None
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op

LARGE = 8192  # actions from which on a schedule is checked and timed by columns; below, loading numpy takes longer
LONG = 512  # actions from which on those of one rank are made by numpy
OPS = tuple(Op)
OP_NUMBER = {op: number for number, op in enumerate(OPS)}
MICROBATCH_SHIFT, STAGE_SHIFT, OP_SHIFT = 16, 38, 58
SLICE_MASK, MICROBATCH_MASK, STAGE_MASK = (1 << 16) - 1, (1 << 22) - 1, (1 << 20) - 1
MOST_STAGES, MOST_MICROBATCHES, MOST_SLICES = STAGE_MASK, MICROBATCH_MASK, SLICE_MASK  # that can be counted
MICROBATCH_STEP = 1 << MICROBATCH_SHIFT  # from one micro-batch to the next
STAGE_STEP = 1 << STAGE_SHIFT  # from one stage to the next


def encode(action: Action) -> int:
    """The integer of an action.

    Raises:
        ScheduleError: a number is negative or too large for its field.
    """
    stage, op, microbatch, piece = action
    b = 0 if microbatch is None else microbatch + 1
    q = 0 if piece is None else piece + 1
    fits = 0 <= stage <= STAGE_MASK and 0 <= b <= MICROBATCH_MASK and 0 <= q <= SLICE_MASK
    if not fits or (b == 0) != (microbatch is None) or (q == 0) != (piece is None):
        raise ScheduleError(
            f"{action}: a schedule has at most {STAGE_MASK:,} stages, {MICROBATCH_MASK:,} micro-batches and "
            f"{SLICE_MASK:,} slices. Use smaller sizes."
        )
    return OP_NUMBER[op] << OP_SHIFT | stage << STAGE_SHIFT | b << MICROBATCH_SHIFT | q


def decode(code: int) -> Action:
    """The inverse of `encode`."""
    b, q = code >> MICROBATCH_SHIFT & MICROBATCH_MASK, code & SLICE_MASK
    return Action(code >> STAGE_SHIFT & STAGE_MASK, OPS[code >> OP_SHIFT], b - 1 if b else None, q - 1 if q else None)


class Order(Sequence[Action]):
    """A sequence of actions that makes each when it is asked for; equal to a tuple of the same actions.

    Args:
        codes: the integers of the actions.
    """

    __slots__ = ("codes",)

    def __init__(self, codes: Iterable[int]) -> None:
        self.codes = array("q", codes)

    def on_later_stages(self, num_stages: int) -> "Order":
        """The same order with every action `num_stages` stages later."""
        step = num_stages * STAGE_STEP
        if len(self.codes) < LONG:
            return Order([code + step for code in self.codes])
        from pipeloom.ir.large.long_orders import increased

        later = Order(())
        later.codes.frombytes(increased(self.codes, step))
        return later

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...

    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        return tuple(map(decode, self.codes[index])) if isinstance(index, slice) else decode(self.codes[index])

    def __iter__(self) -> Iterator[Action]:
        return map(decode, self.codes)

    def __eq__(self, other: object) -> bool:
        return self.codes == other.codes if isinstance(other, Order) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
