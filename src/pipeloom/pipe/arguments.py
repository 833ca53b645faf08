"""What a `Pipe` accepts: its model, balance, devices, chunks and checkpoint mode."""

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeloom.devices.existing import existing_device
from pipeloom.errors import InputError, PipeTypeError, TooFewDevices, folded
from pipeloom.pipe.skips import verify_skippables
from pipeloom.split.chain_partition import consecutive

CHECKPOINT = ("always", "except_last", "never")
AUTOMATIC = ("time", "size")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_module(module: Any) -> None:
    """Check that `module` runs its layers one after the other and that each can lie on a device of its own.

    Raises:
        PipeTypeError: it is no nn.Sequential, or its skips do not pair.
        InputError: it has no layers, a forward or hooks of its own, or layers that share parameters.
    """
    if not isinstance(module, nn.Sequential):
        raise PipeTypeError(f"a {type(module).__name__}: module must be nn.Sequential to be partitioned.")
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        raise InputError(
            f"{type(module).__name__} has a forward of its own, which a pipe would not run. Pass a plain nn.Sequential."
        )
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise InputError("the nn.Sequential has hooks, which a pipe would not run. Register them on the Pipe.")
    if module._parameters or module._buffers:
        raise InputError("the nn.Sequential has parameters or buffers of its own. Move them into a layer.")
    layers = [layer for layer in module._modules.values() if layer is not None]
    if not layers:
        raise InputError("the nn.Sequential has no layers: a pipe needs at least one. Add a layer.")
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for tensor in (*layer.parameters(), *layer.buffers()):
            if is_lazy(tensor):
                raise InputError("a layer is lazy: its parameters have no shapes. Run the model once before.")
            if tensor.is_meta:
                raise InputError(
                    f"layer {index} is on the meta device: its tensors have shapes and no values. Call "
                    "to_empty(device='cpu') and load_state_dict() on the model before."
                )
            if homes.setdefault(id(tensor), index) != index:
                first = layers[homes[id(tensor)]]
                rule = "module with duplicate children is not supported"
                if layer is not first:
                    rule = "module with duplicate parameters in distinct children is not supported"
                raise InputError(f"{rule}: layers {homes[id(tensor)]} and {index}. Put what they share into one layer.")
        if layer in layers[:index] and any(True for _ in layer.parameters()):
            raise InputError(
                f"module with duplicate children is not supported: layers {layers.index(layer)} and {index}. "
                "Put both calls into one layer."
            )
    verify_skippables(module)


def checked_chunks(chunks: Any) -> int:
    """The number of micro-batches.

    Raises:
        InputError: it is no positive integer.
    """
    try:
        number = 0 if isinstance(chunks, bool) else operator.index(chunks)
    except TypeError:
        number = 0
    if number < 1:
        raise InputError(f"chunks={folded(chunks)}: must be a positive integer, the number of micro-batches.")
    return number


def checked_checkpoint(mode: Any) -> str:
    """The checkpoint mode.

    Raises:
        InputError: it is none of the three.
    """
    if str(mode) not in CHECKPOINT:
        raise InputError(
            f"checkpoint={str(mode)!r}: checkpoint is not one of 'always', 'except_last', or 'never'. Choose one."
        )
    return str(mode)


def checked_balance(balance: Any, num_layers: int) -> list[int] | str | None:
    """Layers per partition, or how to find them.

    Raises:
        InputError: numbers that are not positive or do not add up to the number of layers.
    """
    if balance is None or (isinstance(balance, str) and balance in AUTOMATIC):
        return balance
    fix = f"Give positive integers with sum {num_layers}, or 'time', or 'size'."
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        raise InputError(f"balance={folded(balance)}: must be a list of layers per partition. {fix}")
    counts = list(balance)
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise InputError(f"balance={folded(counts)}: each partition needs at least one layer. {fix}")
    if sum(counts) != num_layers:
        raise InputError(f"balance={folded(counts)}: the model has {num_layers} layers, not {sum(counts)}. {fix}")
    return counts


def checked_devices(devices: Any, num_partitions: int | None) -> list[torch.device]:
    """The device of each partition; where their number is unknown, all devices.

    Args:
        devices: of the user; None: all CUDA devices, or the CPU for each partition.
        num_partitions: None: as many as devices.

    Raises:
        TooFewDevices: fewer devices than partitions.
        InputError: no devices.
    """
    if devices is None:
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if not found:
            found = [torch.device("cpu")] * (1 if num_partitions is None else num_partitions)
    else:
        if isinstance(devices, str | int | torch.device):
            devices = [devices]
        found = [existing_device(each, "devices") for each in devices]
    if num_partitions is None:
        if not found:
            raise InputError("devices=[]: a pipe needs at least one device.")
        return found
    if num_partitions > len(found):
        raise TooFewDevices(
            f"{num_partitions} partitions, {len(found)} devices: each partition needs a device. Give more devices, "
            "which may repeat, or fewer partitions."
        )
    return found[:num_partitions]


def placed_by_user(module: nn.Sequential) -> tuple[list[int], list[torch.device]] | None:
    """Layers per partition and devices, where the user's layers lie on several devices already; else None."""
    places = [next((parameter.device for parameter in layer.parameters()), None) for layer in module]
    if len({place for place in places if place is not None}) < 2:
        return None
    known = next(place for place in places if place is not None)
    filled = []
    for place in places:
        known = place or known
        filled.append(known)
    groups = [(device, len(list(group))) for device, group in groupby(filled)]
    return [count for _, count in groups], [device for device, _ in groups]


def partitions_of(layers: Sequence[tuple[str, nn.Module]], balance: Sequence[int]) -> nn.ModuleList:
    """The layers as one nn.Sequential per partition."""
    return nn.ModuleList(nn.Sequential(OrderedDict(each)) for each in consecutive(layers, balance))
