"""Options of the processes that share a stage, as `simulate --model`, `partition` and `slice` have them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pipeloom.errors import InputError
from pipeloom.parallel.inside_stage import InsideStage

LAYOUT = {  # option -> attribute of InsideStage
    "tensor": "tensor",
    "tensor_layout": "layout",
    "tensor_depth": "depth",
    "sequence_parallel": "sequence",
    "context": "context",
    "context_kind": "context_kind",
}


def add_inside_options(group: Any) -> None:
    """Add them to a parser or a group of its options; options that are not given are None."""
    option = group.add_argument
    whole = partial(option, type=int)
    whole("--tensor", help="tensor-parallel degree (default: 1)")
    option("--tensor-layout", choices=("1d", "2d", "2.5d", "3d"), help="how layers are shared (default: 1d)")
    whole("--tensor-depth", help="depth of layout 2.5d")
    option("--sequence-parallel", action="store_true", default=None, help="Megatron's sequence parallelism")
    whole("--context", help="context-parallel degree (default: 1)")
    kinds = ("ring", "ring-plain", "ring-self-attention", "ulysses")
    option("--context-kind", choices=kinds, help="how attention communicates (default: ring)")


def inside_of(given: Mapping[str, Any]) -> InsideStage:
    """The processes of a stage. Raises InputError for a degree below 1, or an option without its degree."""
    chosen = {option: given[option] for option in LAYOUT if given.get(option) is not None}
    inside = InsideStage(**{LAYOUT[option]: value for option, value in chosen.items()})
    for name, degree in (("tensor", inside.tensor), ("context", inside.context)):
        if degree < 1:
            raise InputError(f"--{name} {degree}: must be at least 1.")
    if inside.layout == "2.5d" and inside.depth is None:
        raise InputError("--tensor-layout 2.5d: depth * q * q processes need a depth. Add --tensor-depth, from 1 to q.")
    return inside


def check_has_effect(given: Mapping[str, Any], inside: InsideStage) -> None:
    """Raises InputError for an option of a degree that is 1."""
    for option in LAYOUT:
        name = "context" if option.startswith("context") else "tensor"
        if option != name and given.get(option) is not None and getattr(inside, name) == 1:
            raise InputError(f"--{option.replace('_', '-')}: has no effect without --{name}. Add --{name}, such as 2.")


def inside_text(inside: InsideStage) -> str:
    """The degrees inside a stage as text, such as "tensor 4 (2d) x context 2"."""
    layout = "1d with sequence parallelism" if inside.sequence else inside.layout
    tensor = [f"tensor {inside.tensor} ({layout})"] if inside.tensor > 1 else []
    context = [f"context {inside.context} ({inside.context_kind})"] if inside.context > 1 else []
    return " x ".join([*tensor, *context])


def plan_fields(inside: InsideStage) -> dict[str, Any]:
    """What a plan says of them."""
    found: dict[str, Any] = {"tensor": inside.tensor, "context": inside.context}
    if inside.tensor > 1:
        found |= {"tensor_layout": inside.layout, "tensor_depth": inside.depth, "sequence": inside.sequence}
    if inside.context > 1:
        found["context_kind"] = inside.context_kind
    if inside.expert > 1:
        names = {"dp": "data", "cp": "context"}
        found |= {"expert": inside.expert, "expert_exchange": inside.exchange}
        found["expert_axes"] = ",".join(names[axis] for axis in inside.expert_axes)
    return found
