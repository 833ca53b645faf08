"""The parameters of a rank's stages before they are put into units: which belong together, and which cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.data.buckets import BucketRule, Item
from pipeloom.parallel.data.unit import Unit

_Norm = nn.modules.batchnorm._NormBase
_HELD = "_held_in_units"  # an attribute of parameters in a store


def group_parameters(
    module: nn.Module,
    layers: Sequence[str],
    held: Mapping[str, nn.Parameter],
    homes: Mapping[str, tuple[int, ...]],
    rule: BucketRule,
    num_bytes: Callable[[nn.Parameter], int],
) -> list[dict[str, nn.Parameter]]:
    """A stage's parameters by canonical name, in groups: of one format, one device, all trained or none.

    What the same other stages hold too is a group by itself, so that all of them lay it out alike; so is what the same
    layers of this stage share, which other layers need not have gathered. The rest goes in buckets.

    Args:
        module: the stage.
        layers: names of its layers.
        held: parameters by canonical name.
        homes: by the same names, all stages with the parameter.
        rule: of the buckets.
        num_bytes: of a parameter in the format of forwards.
    """
    names = {parameter: name for name, parameter in held.items()}
    uses = _layers_with(module, layers)
    wide = with_statistics([module])
    apart: dict[tuple[object, ...], list[nn.Parameter]] = {}
    rows: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kind = (parameter.dtype, parameter.device, parameter.requires_grad, parameter in wide)
        stages = homes[names[parameter]]
        if len(stages) > 1:
            apart.setdefault(("stages", stages, *kind), []).append(parameter)
        elif len(uses[parameter]) > 1:
            apart.setdefault(("layers", tuple(uses[parameter]), *kind), []).append(parameter)
        else:
            rows.setdefault(kind, []).append(parameter)
    groups = [sorted(group, key=names.__getitem__) for group in apart.values()]
    for row in rows.values():
        items = [Item(uses[parameter][0], num_bytes(parameter)) for parameter in row]
        groups += [[row[index] for index in bucket] for bucket in rule.cut(items)]
    return [{names[parameter]: parameter for parameter in group} for group in groups]


def _layers_with(module: nn.Module, layers: Sequence[str]) -> dict[nn.Parameter, list[int]]:
    """The numbers of the layers that each parameter is in. What is outside of all is in a first one."""
    found: dict[nn.Parameter, list[int]] = {}
    for index, name in enumerate(layers):
        for parameter in module.get_submodule(name).parameters() if name else ():
            found.setdefault(parameter, []).append(index)
    return {parameter: found.get(parameter, [-1]) for parameter in module.parameters()}


def units_of_layers(module: nn.Module, layers: Sequence[str], unit_of: Mapping[nn.Parameter, Unit]) -> list[list[Unit]]:
    """The units that each layer has to have gathered.

    A unit of neighbouring layers stays from the first of them to the last, also over one without a parameter of it. One
    that several layers share is theirs alone.
    """
    uses = _layers_with(module, layers)
    found: list[dict[Unit, None]] = [{} for _ in layers]
    for unit in units_of(module, unit_of):
        own = [uses[parameter] for parameter in unit.parameters if parameter in uses]
        places = {index for indices in own for index in indices if index >= 0}
        if places and all(len(indices) == 1 for indices in own):
            places = set(range(min(places), max(places) + 1))
        for index in sorted(places):
            found[index][unit] = None
    return [list(units) for units in found]


def with_statistics(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters of modules with running statistics, which keep their format, as do these: they have to be the same."""
    norms = (part for module in modules for part in module.modules() if isinstance(part, _Norm))
    return {parameter for norm in norms for parameter in norm.parameters(False)}


def units_of(module: nn.Module, unit_of: Mapping[nn.Parameter, Unit]) -> list[Unit]:
    """The units with a parameter of `module`, in its order."""
    return list(dict.fromkeys(unit_of[parameter] for parameter in module.parameters()))


def claim(parameters: Mapping[str, nn.Parameter]) -> None:
    """Note that these are in a store. Raises InputError where they are in another one."""
    for name, parameter in parameters.items():
        if _HELD in vars(parameter):
            raise InputError(
                f"parameter {name!r} is held by another Pipeline with shards or masters, which has its values "
                "elsewhere: make the model anew for this one, and load the other's state_dict()"
            )
    for parameter in parameters.values():
        setattr(parameter, _HELD, True)


def refuse_sparse(stages: Mapping[int, nn.Module]) -> None:
    """Raises InputError where a layer makes sparse gradients."""
    for stage in stages.values():
        for name, module in stage.named_modules():
            if getattr(module, "sparse", False) is True and next(module.parameters(False), None) is not None:
                raise InputError(
                    f"module {name!r} ({type(module).__name__}) makes sparse gradients: copies of a pipeline sum dense "
                    "ones; build it with sparse=False"
                )


def cast_tables(stages: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Buffers that are no state, such as tables of rotary positions, take the format of forwards."""
    for stage in stages:
        for module in stage.modules():
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def release(modules: Iterable[nn.Module]) -> None:
    """The opposite of `claim`."""
    for module in modules:
        for parameter in module.parameters():
            vars(parameter).pop(_HELD, None)
