"""Naive model parallelism: one micro-batch in the pipeline at a time.

    rank 0  0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
    rank 1  ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
    rank 2  ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...

Every rank but one stands idle at any moment: makespan ``m * p * (tF + tB)``, one live activation a rank.
"""

from __future__ import annotations

from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.sizes import sized


@sized
def naive(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes all the way down and back up before the next one enters."""
    orders = tuple(
        tuple(Action(d, op, b) for b in range(num_microbatches) for op in (Op.F, Op.B)) for d in range(num_ranks)
    )
    return Schedule(name="naive", num_microbatches=num_microbatches, placement=Placement.loop(num_ranks), orders=orders)
