"""pipeloom: pipeline-parallel training for PyTorch, with every schedule seen, checked, simulated and run.

Importing this package imports no torch; what needs torch is loaded when it is first used.
"""

from __future__ import annotations

import importlib

from pipeloom.errors import PipeloomError
from pipeloom.version import __version__

TYPE_CHECKING = False  # checkers take it for typing's, whose import would be most of the time that this one takes
if TYPE_CHECKING:
    from typing import Any

    from pipeloom import ir, passes, schedules
    from pipeloom.ir import Action, Op, Placement, Program, Schedule, check
    from pipeloom.parallel import DataParallel, Mesh, OffloadActivations, OffloadedOptimizer, Precision
    from pipeloom.runtime import (
        BarrierStep,
        LossScaler,
        Pipeline,
        PostValidatedStep,
        Stream,
        StreamUpdate,
        Update,
        clip_grad_norm,
        update_parameters,
    )
    from pipeloom.sim import Costs, Network, Timeline, simulate

# Public names and the module each lives in. All are loaded at first use, so that a command is soon where it can answer
# an interrupt.
_LAZY = {
    "Action": "pipeloom.ir",
    "Op": "pipeloom.ir",
    "Placement": "pipeloom.ir",
    "Program": "pipeloom.ir",
    "Schedule": "pipeloom.ir",
    "check": "pipeloom.ir",
    "ir": "pipeloom.ir",
    "passes": "pipeloom.passes",
    "schedules": "pipeloom.schedules",
    "Costs": "pipeloom.sim",
    "Network": "pipeloom.sim",
    "Timeline": "pipeloom.sim",
    "simulate": "pipeloom.sim",
    "BarrierStep": "pipeloom.runtime",
    "LossScaler": "pipeloom.runtime",
    "DataParallel": "pipeloom.parallel",
    "Mesh": "pipeloom.parallel",
    "OffloadActivations": "pipeloom.parallel",
    "OffloadedOptimizer": "pipeloom.parallel",
    "Precision": "pipeloom.parallel",
    "Pipeline": "pipeloom.runtime",
    "PostValidatedStep": "pipeloom.runtime",
    "Stream": "pipeloom.runtime",
    "StreamUpdate": "pipeloom.runtime",
    "Update": "pipeloom.runtime",
    "clip_grad_norm": "pipeloom.runtime",
    "update_parameters": "pipeloom.runtime",
    "split": "pipeloom.split",
    "sim": "pipeloom.sim",
    "runtime": "pipeloom.runtime",
    "report": "pipeloom.report",
}

__all__ = [
    "Action",
    "BarrierStep",
    "Costs",
    "DataParallel",
    "LossScaler",
    "Mesh",
    "Network",
    "OffloadActivations",
    "OffloadedOptimizer",
    "Op",
    "Pipeline",
    "PipeloomError",
    "Placement",
    "PostValidatedStep",
    "Precision",
    "Program",
    "Schedule",
    "Stream",
    "StreamUpdate",
    "Timeline",
    "Update",
    "__version__",
    "check",
    "clip_grad_norm",
    "ir",
    "passes",
    "schedules",
    "simulate",
    "update_parameters",
]


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    module = importlib.import_module(home)
    return module if home == f"pipeloom.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
