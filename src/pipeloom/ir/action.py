"""`Op`, `Action`, and `Order`: one rank's actions as integers, for schedules of millions of actions.

An action of an `Order` is one integer of 63 bits, so a range of micro-batches is a range of integers:

    | op, 5 bits | stage, 20 | micro-batch + 1, 22 | slice + 1, 16 |        0 in a field of + 1 stands for None
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, overload

from pipeloom.errors import ScheduleError


class Op(StrEnum):
    """The kind of an action. Printed actions show the value, as in ``2F0``."""

    F = "F"  # forward
    B = "B"  # full backward: gradients of the input and of the weights
    I = "I"  # noqa: E741  # backward of the input alone ("B" in the zero-bubble papers)
    W = "W"  # backward of the weights alone
    SEND_F = "SEND_F"  # send the output of a forward to the next stage
    RECV_F = "RECV_F"  # wait for the input of a forward
    SEND_B = "SEND_B"  # send the gradient of a stage's input to the previous stage
    RECV_B = "RECV_B"  # wait for the gradient of a stage's output
    REDUCE_GRAD = "REDUCE_GRAD"  # sum gradients over the ranks that hold the same parameters
    UNSHARD = "UNSHARD"  # gather the stage's sharded parameters
    RESHARD = "RESHARD"  # free them again
    OFFLOAD = "OFFLOAD"  # offload a stage's saved activations or states
    RELOAD = "RELOAD"  # reload them to the device
    STEP = "STEP"  # update the stage's parameters


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS, RECEIVES = frozenset({Op.SEND_F, Op.SEND_B}), frozenset({Op.RECV_F, Op.RECV_B})
COMMUNICATION_OPS = SENDS | RECEIVES
OTHER_ENDS = {  # from a message's op to the stage, relative to its own, and the op at the other end
    Op.SEND_F: (1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (1, Op.SEND_B),
}


class Action(NamedTuple):
    """One op of one stage on one micro-batch, or on one slice of it.

    `microbatch` is None for ops on the whole stage (REDUCE_GRAD, STEP, ...). `slice` is None unless sequences are
    sliced. ``str(Action(2, Op.F, 0))`` is ``"2F0"``, with slice 3 ``"2F0.3"``.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.slice is not None:
            text += f".{self.slice}"
        return text

    def with_op(self, op: Op) -> Action:
        """The same stage, micro-batch and slice under another op."""
        return Action(self.stage, op, self.microbatch, self.slice)

    def other_end(self) -> Action:
        """The RECV of this SEND, or the SEND of this RECV."""
        step, op = OTHER_ENDS[self.op]
        return Action(self.stage + step, op, self.microbatch, self.slice)


LARGE = 8192  # actions from which on a schedule is checked and timed by columns; below, loading numpy takes longer
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
