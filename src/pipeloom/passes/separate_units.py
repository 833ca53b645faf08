"""An overlapped F and B one after the other, as one thread runs them.

    unit:      RECV_F RECV_B (F & B) SEND_F SEND_B          separate:  RECV_F F SEND_F RECV_B B SEND_B

Who runs both at once waits for the messages of both and has both results at the end. Who does not would waste the time
of a B before its neighbour gets the result of F, and that of an F in which the message for B may still come. Every wait
comes later or at the same place, so nothing can deadlock that did not before.
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.schedule import Schedule


def separate_units(schedule: Schedule) -> Schedule:
    """`schedule` without overlapped units, its orders as they are; itself if it has none."""
    return replace(schedule, overlapped=frozenset()) if schedule.overlapped else schedule
