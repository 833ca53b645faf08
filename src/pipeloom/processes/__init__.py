"""Processes of a run: launcher, rendezvous, collectives, and what a process leaves behind for others to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.processes.black_box import BLACKBOX_BYTES
    from pipeloom.processes.collectives import all_gather_bytes

# Public names, and the module that each lives in.
_HOMES = {
    "BLACKBOX_BYTES": "pipeloom.processes.black_box",
    "all_gather_bytes": "pipeloom.processes.collectives",
}

__all__ = [
    "BLACKBOX_BYTES",
    "all_gather_bytes",
]

__getattr__ = lazy_exports(__name__, _HOMES)
