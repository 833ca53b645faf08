"""The processes of a run.

launcher        starts the ranks of a run on this host, and ends them all when one fails
black_box       a page of memory with a rank's step, action and error, which outlives the rank
rendezvous      how processes meet, also after torchrun has restarted them
agreement       compares what processes are about to run
collectives     small collectives; also the end of gloo's threads
host_memory     whether freed host memory stays in the process
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.processes.black_box import BLACKBOX_BYTES
    from pipeloom.processes.collectives import all_gather_bytes

# Module -> its public names, loaded at first use.
_LAZY = {"pipeloom.processes.black_box": "BLACKBOX_BYTES", "pipeloom.processes.collectives": "all_gather_bytes"}

__all__ = ["BLACKBOX_BYTES", "all_gather_bytes"]

__getattr__ = lazy_exports(__name__, _LAZY)
