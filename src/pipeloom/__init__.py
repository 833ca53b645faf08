"""pipeloom: pipeline-parallel training for PyTorch, with every schedule seen, checked, simulated and run.

Importing this package imports no torch; what needs torch is loaded when it is first used.
"""

from pipeloom.common.lazy_exports import lazy_exports
from pipeloom.errors import PipeloomError
from pipeloom.version import __version__

TYPE_CHECKING = False  # checkers take it for typing's, whose import would be most of the time that this one takes
if TYPE_CHECKING:
    from pipeloom import ir, passes, schedules
    from pipeloom.autograd import Mean, Sum, auxiliary_loss, auxiliary_losses, observe, use_fp8
    from pipeloom.ir import Action, Op, Placement, Program, Schedule, check
    from pipeloom.models import mean_over_labels
    from pipeloom.parallel import (
        DataParallel,
        Mesh,
        OffloadActivations,
        OffloadedOptimizer,
        Precision,
        parallel_cross_entropy,
        parallelize,
        run_threads,
        update_parameters,
    )
    from pipeloom.pipe import Pipe
    from pipeloom.plan.module_plan import plan_module as plan
    from pipeloom.plan.module_plan import plans
    from pipeloom.plan.plan import Plan
    from pipeloom.pretrained import from_pretrained
    from pipeloom.sim import Costs, Network, Timeline, simulate
    from pipeloom.split import register_layout
    from pipeloom.training import (
        BarrierStep,
        Lion,
        LossScaler,
        Muon,
        Pipeline,
        PostValidatedStep,
        Stream,
        StreamUpdate,
        Update,
        Watchdog,
        clip_grad_norm,
        fastest_plan,
    )

# Module -> its public names, all loaded at first use, so that a command is soon where it can answer an interrupt.
_LAZY = {
    "pipeloom": "ir passes plan report schedules sim split",
    "pipeloom.autograd": "Mean Sum auxiliary_loss auxiliary_losses observe use_fp8",
    "pipeloom.ir": "Action Op Placement Program Schedule check",
    "pipeloom.parallel": (
        "DataParallel Mesh OffloadActivations OffloadedOptimizer Precision parallel_cross_entropy parallelize "
        "run_threads update_parameters"
    ),
    "pipeloom.models": "mean_over_labels",
    "pipeloom.pipe": "Pipe",
    "pipeloom.plan.module_plan": "plans",
    "pipeloom.plan.plan": "Plan",
    "pipeloom.pretrained": "from_pretrained",
    "pipeloom.sim": "Costs Network Timeline simulate",
    "pipeloom.split": "register_layout",
    "pipeloom.training": (
        "BarrierStep Lion LossScaler Muon Pipeline PostValidatedStep Stream StreamUpdate Update Watchdog "
        "clip_grad_norm fastest_plan"
    ),
}

__all__ = [
    "Action",
    "BarrierStep",
    "Costs",
    "DataParallel",
    "Lion",
    "LossScaler",
    "Mean",
    "Mesh",
    "Muon",
    "Network",
    "OffloadActivations",
    "OffloadedOptimizer",
    "Op",
    "Pipe",
    "Pipeline",
    "PipeloomError",
    "Placement",
    "Plan",
    "PostValidatedStep",
    "Precision",
    "Program",
    "Schedule",
    "Stream",
    "StreamUpdate",
    "Sum",
    "Timeline",
    "Update",
    "Watchdog",
    "__version__",
    "auxiliary_loss",
    "auxiliary_losses",
    "check",
    "clip_grad_norm",
    "fastest_plan",
    "from_pretrained",
    "ir",
    "mean_over_labels",
    "observe",
    "parallel_cross_entropy",
    "parallelize",
    "passes",
    "plan",
    "plans",
    "register_layout",
    "run_threads",
    "schedules",
    "simulate",
    "update_parameters",
    "use_fp8",
]

__getattr__ = lazy_exports(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *" ".join(_LAZY.values()).split()})
