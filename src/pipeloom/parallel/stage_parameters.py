"""The parameters of a rank's stages before they are put into units: which belong together, and which cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.unit import Unit

_Norm = nn.modules.batchnorm._NormBase
_HELD = "_held_in_units"  # an attribute of parameters in a store


def group_parameters(
    module: nn.Module, layers: Sequence[str], held: Mapping[str, nn.Parameter], homes: Mapping[str, tuple[int, ...]]
) -> list[dict[str, nn.Parameter]]:
    """A stage's parameters by canonical name, in groups: of one layer, one format, one device, all trained or none.

    What other stages hold too is a group by itself, so that all of them lay it out alike.
    """
    names = {parameter: name for name, parameter in held.items()}
    wide = with_statistics([module])
    groups: dict[tuple[object, ...], dict[str, nn.Parameter]] = {}
    for alias, parameter in module.named_parameters():
        name = names[parameter]
        layer = next((layer for layer in layers if layer and alias.startswith(f"{layer}.")), "")
        shared = name if len(homes[name]) > 1 else None
        kind = (parameter.dtype, parameter.device, parameter.requires_grad, parameter in wide)
        key = (shared or layer, shared is not None, *kind)
        groups.setdefault(key, {})[name] = parameter
    return list(groups.values())


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
