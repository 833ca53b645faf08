"""The values of a process's own stages, where the model comes from `from_pretrained`."""

from collections.abc import Iterable
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.pretrained.weights import WEIGHTS, PretrainedWeights
from pipeloom.split import Stages


def _weights(stages: Stages) -> PretrainedWeights | None:
    return getattr(stages.whole, WEIGHTS, None)


def device_of(stages: Stages) -> torch.device:
    """Where the parameters of a model are, or will be once they are read."""
    weights = _weights(stages)
    if weights is not None:
        return weights.device
    devices = dict.fromkeys(p.device for module in stages.modules for p in module.parameters())
    # Stages of other processes may still be on the CPU, or on the meta device.
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def load_stages(stages: Stages, own: Iterable[int]) -> None:
    """Read the values of some stages of a model from `from_pretrained`; those of other models stay as they are.

    Raises:
        InputError: a tensor has no value. CheckpointError: a file cannot be read.
    """
    weights = _weights(stages)
    if weights is not None:
        weights.load([stages.modules[stage] for stage in own])


def forbid_saving(stages: Stages) -> None:
    """Have the uncut model's own `save_pretrained` say that this process has a part of the trained values alone."""
    model = stages.model()
    if model is not None and stages.whole is not None:
        setattr(model, "save_pretrained", _refuse)  # noqa: B010  # replaces a method


def _refuse(*_: Any, **__: Any) -> None:
    raise InputError(
        "save_pretrained: this process trains a part of the model, and the rest has old values here. Call the "
        "Pipeline's save_pretrained(DIR) on every process."
    )
