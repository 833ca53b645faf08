"""Planning before a run: plans, partitions, sequence slices, memory estimates and cluster files."""

from pipeloom.common.lazy_exports import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipeloom.plan.plan import Plan

__all__ = ["Plan"]

# Module -> its public names, loaded at first use.
_LAZY = {"pipeloom.plan.plan": "Plan"}
__getattr__ = lazy_exports(__name__, _LAZY)
