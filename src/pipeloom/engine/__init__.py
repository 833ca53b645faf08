"""One program on one rank: worker, binders of actions, stores of parameters, and the driver of several ranks."""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.engine.worker import RUNNABLE_OPS

_HOMES = {"RUNNABLE_OPS": "pipeloom.engine.worker"}  # public names, and the module that each lives in

__all__ = ["RUNNABLE_OPS"]

__getattr__ = lazy_exports(__name__, _HOMES)
