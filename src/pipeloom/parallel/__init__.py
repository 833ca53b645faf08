"""Parallelism across the processes of a run, and offload: everything in addition to the pipeline itself.

mesh, mesh_shape    processes on named axes (dp, pp, cp, tp), and what communicates along each
axis, axis_forms    collectives along one axis, called inside actions; over channels or a process group
axis_functions      the same, differentiable
tensor              tensor parallelism: layers that processes share
context             context parallelism: sequences that processes share
placed              how a parameter lies on the axes inside a stage; mesh_blocks: what its processes exchange
inside_stage        how processes share a stage, and what they send; traffic: calls and bytes of collectives
options             the user's options for data parallelism and number formats
mixed_precision     number formats, and the optimizer step that widens 16-bit gradients
data                data parallelism: units of parameters, shards, reductions (DDP, ZeRO 1 to 3, parameter server)
offload             activations, optimizer states and main parameters in host memory or on disk

Degrees and options need no torch: names that do are imported on first use.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.parallel.mesh_shape import AXES, MeshShape
from pipeloom.parallel.options import DataParallel, OffloadActivations, Precision

if TYPE_CHECKING:
    from pipeloom.parallel.mesh import Mesh
    from pipeloom.parallel.mixed_precision import update_parameters
    from pipeloom.parallel.offload.offloaded_optimizer import OffloadedOptimizer
    from pipeloom.parallel.tensor.one_d.logits import VocabularyLogits, parallel_cross_entropy
    from pipeloom.parallel.tensor.parallelize import parallelize
    from pipeloom.transport.thread_members import run_threads

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.parallel.mesh": "Mesh",
    "pipeloom.parallel.mixed_precision": "update_parameters",
    "pipeloom.parallel.offload.offloaded_optimizer": "OffloadedOptimizer",
    "pipeloom.parallel.tensor.one_d.logits": "VocabularyLogits parallel_cross_entropy",
    "pipeloom.parallel.tensor.parallelize": "parallelize",
    "pipeloom.transport.thread_members": "run_threads",
}

__all__ = [
    "AXES",
    "DataParallel",
    "Mesh",
    "MeshShape",
    "OffloadActivations",
    "OffloadedOptimizer",
    "Precision",
    "VocabularyLogits",
    "parallel_cross_entropy",
    "parallelize",
    "run_threads",
    "update_parameters",
]

__getattr__ = lazy_exports(__name__, _LAZY)
