"""The parameters of a rank's stages before they form units: which layers read them, and whether they are supported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.data.unit_layout import ParameterUse
from pipeloom.parallel.mixed_precision import with_statistics

_HELD = "_held_in_units"  # an attribute of parameters in a store


def parameter_uses(
    module: nn.Module,
    layers: Sequence[str],
    held: Mapping[str, nn.Parameter],
    homes: Mapping[str, tuple[int, ...]],
    num_bytes: Callable[[nn.Parameter], int],
) -> list[ParameterUse]:
    """The parameters of a stage in its order, as `pipeloom.parallel.data.unit_layout` groups them.

    Args:
        module: the stage.
        layers: names of its layers.
        held: parameters by canonical name.
        homes: by the same names, all stages with the parameter.
        num_bytes: bytes of a parameter in the format of forwards.
    """
    names = {parameter: name for name, parameter in held.items()}
    wide = with_statistics([module])
    users: dict[nn.Parameter, list[int]] = {}
    for index, name in enumerate(layers):
        for parameter in module.get_submodule(name).parameters() if name else ():
            users.setdefault(parameter, []).append(index)
    return [
        ParameterUse(
            names[parameter],
            num_bytes(parameter),
            tuple(users.get(parameter, (-1,))),
            homes[names[parameter]],
            (parameter.dtype, parameter.device, parameter.requires_grad, parameter in wide),
        )
        for parameter in module.parameters()
    ]


def claim(parameters: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters as held by a store. Raises InputError where another store holds them."""
    for name, parameter in parameters.items():
        if _HELD in vars(parameter):
            raise InputError(
                f"parameter {name!r} is held by another Pipeline, which shards it or keeps a master of it. Build a "
                "new model for this Pipeline, and load the other's state_dict()."
            )
    for parameter in parameters.values():
        setattr(parameter, _HELD, True)


def release(modules: Iterable[nn.Module]) -> None:
    """Undo `claim`."""
    for module in modules:
        for parameter in module.parameters():
            vars(parameter).pop(_HELD, None)


def check_dense(stages: Mapping[int, nn.Module]) -> None:
    """Raises InputError where a layer produces sparse gradients."""
    for stage in stages.values():
        for name, module in stage.named_modules():
            if getattr(module, "sparse", False) is True and next(module.parameters(False), None) is not None:
                raise InputError(
                    f"module {name!r} ({type(module).__name__}) produces sparse gradients, which data parallelism does "
                    "not support. Use sparse=False."
                )
