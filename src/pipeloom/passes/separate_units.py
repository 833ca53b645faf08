"""Run an overlapped F and B one after the other, as a single thread does.

    unit:      RECV_F RECV_B (F & B) SEND_F SEND_B          separate:  RECV_F F SEND_F RECV_B B SEND_B

A unit needs both messages at its start and has both results at its end. Run one after the other, F can send before B
starts, and B's message can arrive during F. No receive comes earlier than before, so no new deadlock is possible.
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.schedule import Schedule


def separate_units(schedule: Schedule) -> Schedule:
    """`schedule` with the same orders and without overlapped units; itself if there are none."""
    return replace(schedule, overlapped=frozenset()) if schedule.overlapped else schedule
