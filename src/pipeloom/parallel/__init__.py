"""Processes on named axes, and how replicas of a pipeline share the work, the parameters and the memory.

What needs torch is loaded when it is first used: degrees and options work without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.parallel.mesh_shape import AXES, MeshShape
from pipeloom.parallel.offload.targets import OffloadActivations
from pipeloom.parallel.options import DataParallel, Precision

if TYPE_CHECKING:
    from pipeloom.parallel.mesh import Mesh
    from pipeloom.parallel.mixed_precision import update_parameters
    from pipeloom.parallel.offload.offloaded_optimizer import OffloadedOptimizer

# Public names, and the module that each lives in.
_HOMES = {
    "update_parameters": "pipeloom.parallel.mixed_precision",
    "Mesh": "pipeloom.parallel.mesh",
    "OffloadedOptimizer": "pipeloom.parallel.offload.offloaded_optimizer",
}

__all__ = [
    "AXES",
    "DataParallel",
    "Mesh",
    "MeshShape",
    "OffloadActivations",
    "OffloadedOptimizer",
    "Precision",
    "update_parameters",
]

__getattr__ = lazy_exports(__name__, _HOMES)
