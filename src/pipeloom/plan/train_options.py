"""The options of `pipeloom train` that a plan sets, and the plan of such options."""

from collections.abc import Mapping
from typing import Any

from pipeloom.ir import Schedule
from pipeloom.parallel.mesh_shape import AXES
from pipeloom.plan.plan import Plan
from pipeloom.schedules import is_file

# Option: attribute of the plan, in the order of a command line. A plan always says the first group.
_ALWAYS = {
    "schedule": "schedule",
    "weights": "weights",
    "parallel.pipeline": "pipeline",
    "parallel.replicas": "replicas",
    "parallel.in_flight": "in_flight",
    "parallel.chunks": "virtual_stages",
    "parallel.slices": "slices",
    "parallel.data": "data",
    "parallel.tensor": "tensor",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "batch.microbatches": "microbatches",
}
_IF_GIVEN = {
    "parallel.cut": "cut",
    "parallel.data_strategy": "data_strategy",
    "parallel.data_granularity": "data_granularity",
    "parallel.data_bucket_bytes": "data_bucket_bytes",
    "batch.size": "batch_size",
    "precision.dtype": "precision",
    "precision.gradients": "gradients",
    "memory.recompute": "recompute",
}
_TENSOR = ("tensor_layout", "tensor_depth", "sequence")
_EXPERT = {"expert_axes": "data", "expert_exchange": "counts"}  # and what None means
_OFFLOAD = ("offload", "offload_states", "offload_parameters", "offload_activations")


PLANNED = (*_ALWAYS, *_IF_GIVEN, *(f"parallel.{name}" for name in (*_TENSOR, "context_kind", *_EXPERT, "order")))
PLANNED += (*(f"memory.{name}" for name in _OFFLOAD), "memory.cap")


def options_of_plan(plan: Plan, path: str | None = None) -> dict[str, Any]:
    """What `plan` says of a training run, by the dotted names of the options of `pipeloom train`.

    Options that the plan leaves to the run are missing.

    Args:
        plan: what runs.
        path: its file, which stands for the orders of a plan with a schedule of its own.
    """
    found = {option: getattr(plan, name) for option, name in _ALWAYS.items()}
    found |= {option: getattr(plan, name) for option, name in _IF_GIVEN.items() if getattr(plan, name) is not None}
    if plan.tensor > 1:
        found |= {f"parallel.{name}": getattr(plan, name) for name in _TENSOR}
        found["parallel.tensor_layout"] = plan.tensor_layout or "1d"
    if plan.context > 1:
        found["parallel.context_kind"] = plan.context_kind or "ring"
    if plan.expert > 1:
        found |= {f"parallel.{name}": getattr(plan, name) or usual for name, usual in _EXPERT.items()}
    if plan.order is not None:
        found["parallel.order"] = plan.order
    if plan.offload is not None:
        found |= {f"memory.{name}": getattr(plan, name) for name in _OFFLOAD}
    if plan.recompute is not None:
        found["memory.cap"] = None  # it would choose again
    found["parallel.in_flight"] = plan.in_flight or "noam"
    if plan.num_slices == 1 and plan.slices is not None:
        found["parallel.slices"] = 1
    if isinstance(plan.schedule, Schedule):
        found["schedule"] = str(path)
    return {option: _written(value) for option, value in found.items()}


def _written(value: Any) -> Any:
    """A value as the option has it: lists as words with commas, one word where all are equal words."""
    if not isinstance(value, tuple):
        return value
    same = isinstance(value[0], str) and len(set(value)) == 1
    return value[0] if same else ",".join(map(str, value))


def plan_of_options(options: Mapping[str, Any], schedule: Schedule, **predicted: Any) -> Plan:
    """The plan that sets these options, the inverse of `options_of_plan`.

    Args:
        options: values by dotted names; all that a plan can set are there.
        schedule: what runs with them. A plan holds its orders where the option `schedule` names a file.
        predicted: more attributes of the plan.
    """
    given = {name: _read(name, options[option]) for option, name in (_ALWAYS | _IF_GIVEN).items()}
    stream = schedule.microbatches_per_update is not None
    if options["parallel.data"] == 1 and not options["memory.offload_parameters"]:
        given |= dict.fromkeys(("data_strategy", "data_granularity", "data_bucket_bytes"))
    if options["memory.offload"] is not None:
        given |= {name: options[f"memory.{name}"] for name in _OFFLOAD}
    if given["tensor"] > 1:
        given |= {name: options[f"parallel.{name}"] for name in _TENSOR}
    if given["context"] > 1:
        given["context_kind"] = options["parallel.context_kind"]
    if given["expert"] > 1:
        given |= {name: options[f"parallel.{name}"] for name in _EXPERT}
    order = [axis.strip() for axis in options["parallel.order"].split(",")]
    order += [axis for axis in AXES if axis not in order]
    given["order"] = None if tuple(order) == AXES else ",".join(order)
    given["schedule"] = schedule if options["schedule"] and is_file(options["schedule"]) else schedule.name
    given["in_flight"] = given["in_flight"] if stream else None
    return Plan(**{**given, **predicted})


def _read(name: str, value: Any) -> Any:
    """The value of an option as the attribute `name` has it."""
    if name == "slices" and str(value).isdecimal():
        return int(value)
    if name == "data_bucket_bytes":
        return int(value)
    if name in ("cut", "replicas", "slices", "recompute") and isinstance(value, str):
        words = [word.strip() for word in value.split(",")]
        if all(word.isdecimal() for word in words):
            return tuple(map(int, words))
        return tuple(words) if len(words) > 1 else value
    return value
