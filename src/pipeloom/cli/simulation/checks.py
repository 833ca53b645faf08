"""Validates the options of `pipeloom simulate`: ranges, and options that need or exclude each other."""

import math
from collections.abc import Callable
from typing import Any

from pipeloom.cli.simulation.model import MODEL_OPTIONS
from pipeloom.errors import InputError
from pipeloom.sim.costs import MOST_UNITS

TIMES = ("forward", "backward_input", "backward_weight")
SIZES = ("parameter_bytes", "activation_bytes")
LINKS = {  # option -> attribute of the network
    "data_bandwidth": "data_bytes_per_second",
    "data_sum_bandwidth": "data_sum_bytes_per_second",
    "data_latency": "data_latency_seconds",
    "data_slowdown": "data_slowdown",
    "memory_bandwidth": "memory_bytes_per_second",
}
_OF_DATA = ("data_strategy", "data_granularity", *(name for name in LINKS if name.startswith("data")), "units")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "memory_limit": (lambda limit: limit > 0, "above 0; 1 is the activations of one rank for one micro-batch"),
    "weight_gradient_memory": (lambda ratio: 0 <= ratio <= 1, "from 0 to 1, as a fraction of what F keeps"),
    "effort": (lambda seconds: 0 < seconds < math.inf, "more than 0 and finite"),
    "prove": (lambda seconds: 0 < seconds < math.inf, "more than 0 and finite"),
    "offload": (lambda kept: kept > 0, "more than 0"),
    "data": (lambda degree: degree >= 1, "at least 1"),
    "units": (lambda count: 1 <= count <= MOST_UNITS, f"from 1 to {MOST_UNITS}"),
}


def check_options(options: Any) -> None:
    """Raise InputError if an option is out of range, needs another option, or excludes it."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name, (holds, rule) in _RANGES.items():
        if name in given and not holds(given[name]):
            raise InputError(f"{_flag(name)} {given[name]:g}: must be {rule}.")
    for names, needed, is_there in (
        (_OF_DATA, "--data", "data" in given),
        (("memory_bandwidth",), "--offload", "offload" in given),
        (("cluster",), "--data, --offload or --model", bool(given.keys() & {"data", "offload", "model"})),
        (MODEL_OPTIONS, "--model", "model" in given),
        (("placement", "effort", "prove"), "schedule `search`", "search" in options.names),
    ):
        alone = next((name for name in names if name in given), None)
        if alone is not None and not is_there:
            raise InputError(f"{_flag(alone)} has no effect without {needed}. Add {needed}, or remove {_flag(alone)}.")
    if "costs" in given and "model" in given:
        raise InputError("--costs: does not work with --model, which has times of its own. Remove one of them.")
    for names, content in (((*TIMES, "latency"), "these times"), ((*SIZES, "units"), "a value for every stage")):
        twice = next((name for name in names if name in given), None)
        source = next((name for name in ("costs", "model") if name in given), None)
        if twice is not None and source is not None:
            whose = "whose file has" if source == "costs" else "which has"
            raise InputError(
                f"{_flag(twice)}: does not work with --{source}, {whose} {content}. Remove {_flag(twice)}, or "
                f"--{source}."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
