"""Processes on named axes, and how copies of a pipeline share the work, the parameters and the memory.

What needs torch is loaded when it is first used: degrees and options work without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeloom.parallel.mesh_shape import AXES, MeshShape
from pipeloom.parallel.offload.options import OffloadActivations
from pipeloom.parallel.options import DataParallel, Precision

if TYPE_CHECKING:
    from pipeloom.parallel.mesh import Mesh
    from pipeloom.parallel.offload.optimizer import OffloadedOptimizer

# Public names that need torch, and the module each lives in.
_HOMES = {"Mesh": "pipeloom.parallel.mesh", "OffloadedOptimizer": "pipeloom.parallel.offload.optimizer"}

__all__ = ["AXES", "DataParallel", "Mesh", "MeshShape", "OffloadActivations", "OffloadedOptimizer", "Precision"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeloom.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
