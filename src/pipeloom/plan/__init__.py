"""Planning before a run: plans, partitions, sequence slices, memory estimates and cluster files."""

from pipeloom.common.lazy_exports import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipeloom.plan.plan import Plan

__all__ = ["Plan"]

_LAZY = {"Plan": "pipeloom.plan.plan"}
__getattr__ = lazy_exports(__name__, _LAZY)
