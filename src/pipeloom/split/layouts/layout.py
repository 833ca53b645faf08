"""Layouts: which modules of a model run one after another, from its configuration or registered for its class.

transformers' configurations name the modules of a base model in order, in `base_model_pp_plan`; heads name theirs in
`_pp_plan`. For other models, `register_layout` does; without it, models of transformers are cut as found in their
source (`detection`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from pipeloom.errors import InputError
from pipeloom.split.layouts.detection import detected_parts

# Model class -> patterns, relative to an instance of it.
_REGISTERED: dict[type[nn.Module], tuple[str, ...]] = {}
# The same by class name, for classes of transformers without a plan.
_KNOWN = {"GPT2Model": ("wte", "wpe", "drop", "h.*", "ln_f")}


class Layout(NamedTuple):
    """The parts of a model that run in order.

    Attributes:
        base: name of the module whose plan or layout it is; empty: the model itself.
        patterns: fully qualified names of the parts in execution order, as `layers` of `split`.
        declared: where it comes from, for messages.
        everywhere: names of modules with parameters that every stage has; others that are no parts are on the first
            and the last stage.
    """

    base: str
    patterns: tuple[str, ...]
    declared: str
    everywhere: frozenset[str] = frozenset()


def register_layout(model_class: type[nn.Module], layers: Sequence[str]) -> None:
    """Declare the order in which the forward of a class runs its modules, so that `split` can cut its models.

    Each stage then runs the model's own forward: parts of other stages are passed over. The class may be part of the
    model, such as the encoder below a head: modules defined after it run on the last stage.

    Args:
        model_class: the class; its subclasses have the same layout, unless they have one of their own.
        layers: names of modules in execution order, relative to an instance, such as
            ``["embeddings", "encoder.layer.*", "pooler"]``; a ``*`` matches all members of a container. A module that
            is None in an instance is left out. Each runs
            once in a forward, with hidden states as its first argument, except those before the blocks.

    Raises:
        InputError: not a module class, or no list of names.
    """
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise InputError(
            f"model_class={model_class!r}: must be a subclass of nn.Module, such as transformers.BertModel."
        )
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers) or not layers:
        raise InputError(
            f"layers={layers!r}: must be a list of module names, such as ['embeddings', 'encoder.layer.*']."
        )
    _REGISTERED[model_class] = tuple(layers)


def find_layout(model: nn.Module) -> Layout | None:
    """The layout of a model, or of the module inside it that has one; None: unknown."""
    for base, module in model.named_modules():
        kinds = type(module).__mro__
        patterns = next((_REGISTERED[kind] for kind in kinds if kind in _REGISTERED), None)
        if patterns is None:
            own = (kind.__name__ for kind in kinds if kind.__module__.startswith("transformers."))
            patterns = next((_KNOWN[name] for name in own if name in _KNOWN), None)
        patterns, declared = (_of_plan(module), "base_model_pp_plan") if patterns is None else (patterns, "its layout")
        if patterns:
            patterns = tuple(pattern for pattern in patterns if not _is_none(module, pattern))
            prefix = f"{base}." if base else ""
            heads = _heads(model, base)
            return Layout(base, (*(prefix + pattern for pattern in patterns), *heads), declared)
    parts = detected_parts(model)
    return Layout("", parts.patterns, "the order found in its source", parts.everywhere) if parts else None


def _is_none(module: nn.Module, pattern: str) -> bool:
    """Whether an optional module is left out of this instance: its attribute is None."""
    parent, _, name = pattern.rpartition(".")
    if "*" in pattern:
        return False
    return getattr(module.get_submodule(parent), name, module) is None


def _of_plan(module: nn.Module) -> tuple[str, ...]:
    """The names in a plan of transformers, if the module is the base model that it describes."""
    plan: Any = getattr(getattr(module, "config", None), "base_model_pp_plan", None)
    if not plan or not all(name in module._modules for name in plan):
        return ()
    lists = (nn.ModuleList, nn.ModuleDict)
    return tuple(
        f"{name}.*" if isinstance(module._modules[name], lists) else name
        for name in plan
        if module._modules[name] is not None
    )


def _heads(model: nn.Module, base: str) -> list[str]:
    """The modules in the plans of the models around a base model, innermost first."""
    found: list[str] = []
    name = base
    while name:
        name = name.rpartition(".")[0]
        around = model.get_submodule(name)
        plan: Any = getattr(type(around), "_pp_plan", None) or {}
        tied: Any = getattr(type(around), "_tied_weights_keys", None) or {}
        keys = dict.fromkeys((*plan, *(key.removesuffix(".weight") for key in tied)))
        prefix = f"{name}." if name else ""
        found += [prefix + key for key in keys if around._modules.get(key) is not None]
    return found


def runs_in_order(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether a model's forward is known to run these layers one after another, and nothing else.

    It does for the modules of an nn.Sequential, also of those inside it, in their order; and for the layers that a
    class declares as `pipeline_layers` with its forward. A subclass with another forward, forward hooks and a forward
    set on the instance may do something else, also of a module around layers.
    """
    around = {".".join(name.split(".")[:end]) for name in names for end in range(name.count(".") + 1)}
    containers = {name: model.get_submodule(name) for name in around}
    for container in containers.values():
        if "forward" in vars(container) or container._forward_hooks or container._forward_pre_hooks:
            return False
    if all(type(container).forward is nn.Sequential.forward for container in containers.values()):
        order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
        places = [order[name] for name in names]
        return places == sorted(places)
    if "pipeline_layers" in vars(model):
        return True
    for kind in type(model).__mro__:
        if "pipeline_layers" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False
