"""Planning before a run: plans, partitions, sequence slices, memory estimates and cluster files.

``pipeloom.plan(model, example, cluster=..., global_batch_size=...)`` calls `plan_module`.
"""

import sys
from types import ModuleType

from pipeloom.common.lazy_exports import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from inspect import Signature
    from typing import Any

    from pipeloom.plan.module_plan import plan_module, plans
    from pipeloom.plan.plan import Plan

__all__ = ["Plan", "plan_module", "plans"]

# Module -> its public names, loaded at first use.
_LAZY = {"pipeloom.plan.module_plan": "plan_module plans", "pipeloom.plan.plan": "Plan"}
__getattr__ = lazy_exports(__name__, _LAZY)


class _Package(ModuleType):
    """The package as a function: its own name is the user's word for it."""

    def __call__(self, *args: "Any", **options: "Any") -> "Plan":
        from pipeloom.plan.module_plan import plan_module

        return plan_module(*args, **options)

    @property
    def __signature__(self) -> "Signature":
        import inspect

        from pipeloom.plan.module_plan import plan_module

        return inspect.signature(plan_module)


sys.modules[__name__].__class__ = _Package
