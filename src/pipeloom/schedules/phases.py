"""`Phases`: a rank's order written as the papers draw it, one repeated pattern after the other; 1F1B's in one call.

lane = Phases()                      rank 0 of 1F1B with two warm-up forwards and four micro-batches:
lane.repeat(2, (0, F))               0F0 0F1
lane.repeat(2, (0, F), (0, B))       0F2 0B0 0F3 0B1
lane.repeat(2, (0, B))               0B2 0B3
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Self

from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.order import LONG, MICROBATCH_MASK, MICROBATCH_SHIFT, MICROBATCH_STEP, Order, encode


class Phases:
    """One rank's order, made phase by phase; every (stage, op) counts its own micro-batches up.

    Args:
        first: the first micro-batch.
        stride: the step to the next micro-batch: the number of replicas of the stage.
    """

    def __init__(self, *, first: int = 0, stride: int = 1) -> None:
        self._first, self._stride = first, stride
        self._codes = array("q")
        self._done: dict[tuple[int, Op], int] = {}

    def done(self, stage: int, op: Op) -> int:
        """The number of micro-batches of this stage and op in the order so far."""
        return self._done.get((stage, op), 0)

    def repeat(self, count: int, *pattern: tuple[int, Op]) -> Self:
        """Append the pattern `count` times, each (stage, op) with its next micro-batch; nothing if `count` < 1."""
        if count < 1:
            return self
        counts = []  # of each place of the pattern, its codes
        for stage, op in pattern:
            done = self.done(stage, op)
            first, last = (encode(Action(stage, op, self._first + b * self._stride)) for b in (done, done + count - 1))
            counts.append(range(first, last + 1, MICROBATCH_STEP * self._stride))
            self._done[stage, op] = done + count
        if count < LONG:
            self._codes.extend(chain.from_iterable(zip(*counts, strict=True)))
        else:
            from pipeloom.ir.large.long_orders import in_turn

            self._codes.frombytes(in_turn(counts))
        return self

    def alternate(self, stage: int, num_microbatches: int, warmup: int) -> Self:
        """Append up to `warmup` forwards, then forward and backward in turn, then the backwards left."""
        count = len(range(self._first, num_microbatches, self._stride))
        warmup = min(warmup, count)
        self.repeat(warmup, (stage, Op.F)).repeat(count - warmup, (stage, Op.F), (stage, Op.B))
        return self.repeat(warmup, (stage, Op.B))

    def order(self, num_microbatches: int | None = None) -> Order:
        """The order, cut to the first `num_microbatches` if given."""
        if num_microbatches is None:
            return Order(self._codes)
        return Order(code for code in self._codes if code >> MICROBATCH_SHIFT & MICROBATCH_MASK <= num_microbatches)


def alternating(name: str, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    """1F1B with one stage per rank and a warm-up of at most ``warmups[d]`` forwards on rank d."""
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        placement=Placement.loop(len(warmups)),
        orders=tuple(Phases().alternate(d, num_microbatches, w).order() for d, w in enumerate(warmups)),
    )
