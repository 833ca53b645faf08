"""The processes of a run.

launcher        starts the ranks of a run on this host, and ends them all when one fails; their black boxes
agreement       compares what processes are about to run
collectives     the default process group: how processes meet (also after torchrun restarted them), small collectives
host_memory     whether freed host memory stays in the process
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.processes.collectives import all_gather_bytes
    from pipeloom.processes.launcher import BLACKBOX_BYTES

# Public names, and the module that each lives in.
_HOMES = {"BLACKBOX_BYTES": "pipeloom.processes.launcher", "all_gather_bytes": "pipeloom.processes.collectives"}

__all__ = ["BLACKBOX_BYTES", "all_gather_bytes"]

__getattr__ = lazy_exports(__name__, _HOMES)
