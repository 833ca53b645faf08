"""One process, one thread per device: `Pipe` runs an nn.Sequential as a pipeline and autograd runs it backwards."""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.pipe.balance import balance_by_size, balance_by_time
    from pipeloom.pipe.batch_norm import DeferredBatchNorm
    from pipeloom.pipe.calls.stage_call import is_checkpointing, is_recomputing
    from pipeloom.pipe.pipe import Pipe
    from pipeloom.pipe.skips import verify_skippables
    from pipeloom.split.skippable import Namespace, pop, skippable, stash

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.pipe.balance": "balance_by_size balance_by_time",
    "pipeloom.pipe.batch_norm": "DeferredBatchNorm",
    "pipeloom.pipe.pipe": "Pipe",
    "pipeloom.pipe.skips": "verify_skippables",
    "pipeloom.split.skippable": "Namespace pop skippable stash",
    "pipeloom.pipe.calls.stage_call": "is_checkpointing is_recomputing",
}

__all__ = [
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]

__getattr__ = lazy_exports(__name__, _LAZY)
