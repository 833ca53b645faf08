"""The rules that the values of a `Plan` keep. Values that leave the choice to the run are not among those given."""

import math
import re
from collections.abc import Mapping
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, either
from pipeloom.ir import DataStrategy, Schedule, check
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.mesh_shape import AXES
from pipeloom.parallel.options import check_synchronous
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.schedules import find

CUTS = ("layers", "parameters", "time")
_LEAST_1 = ("pipeline", "microbatches", "data", "virtual_stages", "batch_size", "replicas", "slices")
_INSIDE = {
    "tensor": ("tensor_layout", "tensor_depth", "sequence"),
    "context": ("context_kind",),
    "expert": ("expert_axes", "expert_exchange"),
}
_OFFLOADED = ("offload_states", "offload_parameters", "offload_activations")


def check_values(given: Mapping[str, Any]) -> None:
    """Raises InputError for values that contradict each other, whatever the schedule."""
    for name, least in {
        **dict.fromkeys((*_LEAST_1, *_INSIDE), 1),
        "data_bucket_bytes": 0,
        "offload_activations": 0,
    }.items():
        value = given.get(name, least)
        if min(value if isinstance(value, tuple) else (value,), default=least - 1) < least:
            each = "each " if name in ("replicas", "slices") else ""
            raise _refusal(given, name, f"{each}must be at least {least}. Raise it.")
    samples = given["microbatches"] * given["data"]
    if given.get("batch_size", samples) < samples:
        raise _refusal(
            given,
            "batch_size",
            f"{given['microbatches']} micro-batches on each of {given['data']} data-parallel replicas need at least "
            f"{samples} samples. Raise it, or lower microbatches.",
        )
    _check_inside(given)
    order = given.get("order", ",".join(AXES)).split(",")
    if sorted(order) != sorted(AXES):
        raise _refusal(given, "order", f"must name {', '.join(AXES)}, outermost first, each once.")
    predictions = {"predicted_step_seconds": given.get("predicted_step_seconds", 0.0)}
    for rank, size in enumerate(given.get("predicted_memory_bytes", ())):
        predictions[f"predicted_memory_bytes[{rank}]"] = size
    for name, value in predictions.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}={value}: must be finite and at least 0. Correct or remove it.")
    if "replicas" in given:
        schedule, stages = given["schedule"], len(given["replicas"])
        if isinstance(schedule, str) and "replicas" not in find(schedule).stream:
            rule = f"schedule {schedule!r} flushes, so each stage has one rank. Remove replicas, or use pipedream."
            raise _refusal(given, "replicas", rule)
        if stages != given["pipeline"]:
            rule = f"{counted(stages, 'stage')}, but pipeline={given['pipeline']}."
            fix = "With replicas, `pipeline` is the number of stages. Make both agree."
            raise _refusal(given, "replicas", f"{rule} {fix}")
    offloaded = [name for name in _OFFLOADED if name in given]
    shards, gathering = given.get("data_strategy", "ddp"), [known for known in DataStrategy if known.shards_parameters]
    if "offload_parameters" in given and shards not in gathering and given.get("precision", "fp32") == "fp32":
        fix = "Use zero3, bf16 or fp16, or remove offload_parameters."
        rule = f"with {shards} in fp32 every forward reads the parameters. {fix}"
        raise _refusal(given, "offload_parameters", rule)
    target = given.get("offload")
    if target is None:
        if offloaded:
            raise _refusal(given, offloaded[0], "no offload target. Add offload='cpu'.")
    elif target != "cpu" and not re.fullmatch("(?s)disk:.+", target):
        raise InputError(f"offload={target!r}: must be 'cpu' or 'disk:PATH'.")
    elif not offloaded:
        raise InputError(f"offload={target!r}: nothing is offloaded. Remove it, or set offload_states=True.")


def check_schedule(given: Mapping[str, Any], schedule: Schedule) -> None:
    """Raises InputError for values that contradict the schedule, which a plan may hold itself."""
    if schedule is given["schedule"]:
        check(schedule)
        made = {
            "pipeline": schedule.num_ranks,
            "microbatches": schedule.microbatches_per_update or schedule.num_microbatches,
            "virtual_stages": schedule.placement.num_chunks,
        }
        for name, number in made.items():
            if given[name] != number:
                rule = f"the orders of schedule {schedule.name!r} have {number}. Use {name}={number}."
                raise _refusal(given, name, rule)
        for name in ("replicas", "in_flight", "weights"):
            if name in given:
                raise _refusal(given, name, f"the orders of schedule {schedule.name!r} already say it. Remove {name}.")
    slices, stages = given.get("slices", schedule.num_slices), schedule.num_stages
    if schedule.num_slices != (len(slices) if isinstance(slices, tuple) else slices):
        rule = f"schedule {schedule.name!r} has {counted(schedule.num_slices, 'slice')}. Make both agree."
        raise _refusal(given, "slices", rule)
    for name in ("data", "context", "precision"):
        if given.get(name) not in (None, 1, "fp32"):
            check_synchronous(schedule, f"{name}={given[name]}")
    cut = given.get("cut", CUTS[0])
    if isinstance(cut, str):
        if cut not in CUTS:
            raise InputError(
                f"cut={cut!r}: must be {', '.join(map(repr, CUTS))}, or a list with the number of layers of each "
                "stage, such as [3, 2]."
            )
    elif cut and isinstance(cut[0], str):
        if len(cut) != stages - 1:
            rule = f"names {counted(len(cut), 'module')}, but schedule {schedule.name!r} has {stages} stages, of which"
            raise _refusal(given, "cut", f"{rule} {stages - 1} begin behind the first. Name one module for each.")
    elif len(cut) != stages:
        rule = f"{counted(len(cut), 'stage')}, but schedule {schedule.name!r} has {stages}."
        raise _refusal(given, "cut", f"{rule} Give the layers of each stage.")
    elif min(cut) < 0 or (stages > 1 and not all(cut[1:-1])) or not any(cut):
        raise _refusal(given, "cut", "a stage needs a layer. Give each stage at least 1.")
    if "recompute" in given:
        recompute_of_stages(given["recompute"], stages)
    ranks = len(given.get("predicted_memory_bytes", range(schedule.num_ranks)))
    if ranks != schedule.num_ranks:
        raise InputError(
            f"predicted_memory_bytes has {counted(ranks, 'rank')}, but the pipeline has {schedule.num_ranks}. Give one "
            "number per rank."
        )


def _check_inside(given: Mapping[str, Any]) -> None:
    """Raises InputError for values of tensor, context and expert parallelism that contradict each other."""
    for degree, names in _INSIDE.items():
        for name in names:
            if name in given and given[degree] == 1:
                raise _refusal(given, name, f"has no effect with {degree}=1. Remove it, or raise {degree}.")
    layout = given.get("tensor_layout", "1d")
    axes = given.get("expert_axes", "data").split(",")
    if (number := math.prod(given[name] for name in axes)) % given["expert"]:
        rule = f"must divide the number of processes along {' and '.join(axes)}, {number}"
        raise _refusal(given, "expert", f"{rule}. Use {either(divisors(number))}.")
    if given["expert"] > 1 and layout != "1d":
        raise _refusal(given, "expert", f"works with tensor_layout='1d' alone, not {layout!r}. Remove one of them.")
    if layout != "1d":
        GridShape.of(given["tensor"], layout, given.get("tensor_depth"))
        if "sequence" in given:
            raise _refusal(given, "sequence", f"works with tensor_layout='1d' alone, not {layout!r}. Remove it.")
    elif "tensor_depth" in given:
        raise _refusal(given, "tensor_depth", "has no effect with tensor_layout='1d'. Remove it, or use '2.5d'.")
    if given["context"] > 1 and given.get("slices", 1) not in (1, (1,)):
        raise _refusal(given, "context", "does not work with slices, which cut the sequence too. Remove one of them.")


def _refusal(given: Mapping[str, Any], name: str, rule: str) -> InputError:
    value = given[name]
    return InputError(f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}: {rule}")
