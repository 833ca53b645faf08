"""Options of experts, as `simulate --model` has them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture

AXES = {"data": "dp", "context": "cp"}
EXPERTS = ("expert", "expert_axes", "expert_exchange", "expert_imbalance")


def add_expert_options(group: Any) -> None:
    """Add them to a group of a parser; options that are not given are None."""
    option = group.add_argument
    option("--expert", type=int, help="expert-parallel degree (default: 1)")
    axes = ("data", "context", "data,context")
    option("--expert-axes", choices=axes, help="whose processes share experts (default: data)")
    option("--expert-exchange", choices=("counts", "capacity"), help="how tokens reach experts (default: counts)")
    option("--expert-imbalance", type=float, help="load of the busiest process over the mean load (default: 1)")


def with_experts(inside: InsideStage, given: Mapping[str, Any], data: int) -> InsideStage:
    """`inside` with the options of experts.

    Raises:
        InputError: a degree below 1 or one that does not divide the processes along its axes; an imbalance that no
            routing has.
    """
    degree, axes = given.get("expert", 1), given.get("expert_axes", "data")
    if degree < 1:
        raise InputError(f"--expert {degree}: must be at least 1.")
    imbalance = given.get("expert_imbalance", 1.0)
    if not imbalance >= 1:
        raise InputError(f"--expert-imbalance {imbalance:g}: must be at least 1, balanced experts.")
    names = axes.split(",")
    line = (data if "data" in names else 1) * (inside.context if "context" in names else 1)
    if line % degree:
        raise InputError(
            f"--expert {degree}: must divide the number of processes along {axes.replace(',', ' and ')}, {line}. Use "
            f"another degree, or raise --{names[0]}."
        )
    for option in ("expert_axes", "expert_exchange", "expert_imbalance"):
        if option in given and degree == 1:
            raise InputError(f"--{option.replace('_', '-')}: has no effect without --expert. Add --expert, such as 2.")
    if imbalance > degree:
        raise InputError(
            f"--expert-imbalance {imbalance:g}: must be at most --expert {degree}, all tokens on one process. Lower it."
        )
    exchange = given.get("expert_exchange", "counts")
    return replace(inside, expert=degree, expert_axes=tuple(AXES[name] for name in names), exchange=exchange)


def check_experts(model: Architecture, given: Mapping[str, Any]) -> None:
    """Raises InputError for options of experts that `model` does not have, or a capacity that it does not limit."""
    for option in EXPERTS:
        if option in given and model.experts is None:
            raise InputError(
                f"--{option.replace('_', '-')}: {model.name} has no experts. Remove it, or use a mixture such as "
                "mixtral-8x7b."
            )
    if given.get("expert_exchange") == "capacity" and model.experts and model.experts.capacity_factor is None:
        raise InputError(
            f"--expert-exchange capacity: {model.name} has no capacity_factor, so a process may send all its tokens to "
            "one expert. Use counts."
        )
