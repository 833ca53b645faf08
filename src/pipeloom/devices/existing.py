"""`existing_device`: the device that a user names."""

from typing import Any

import torch

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, folded


def existing_device(device: Any, option: str) -> torch.device:
    """A device of this machine; a CUDA device with its index.

    Args:
        device: what `torch.device` takes.
        option: how the user gave it, for errors.

    Raises:
        InputError: it is no device, or does not exist here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{option}: {folded(device)} is no device. Use names such as 'cuda:0' or 'cpu'.") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    if count <= (found.index or 0):
        seen = f"this machine has {counted(count, 'CUDA device')}" if count else "there are no CUDA devices here"
        raise InputError(f"{option}: {folded(str(found))} does not exist, {seen}. Use others, such as 'cpu'.")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
