"""What Trainer holds in place of the model and of its data loaders: `PipelinedModel` and `FirstLoads`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.processes import Processes
from pipeloom.ir import Schedule
from pipeloom.pretrained.weights import WEIGHTS
from pipeloom.split import split
from pipeloom.training import Pipeline


class PipelinedModel(nn.Module):
    """A model and the pipeline that runs it.

    Attributes:
        module: the model; outside of this process's stages its values are not those in training.
        pipe: the pipeline.
    """

    def __init__(self, model: nn.Module, pipe: Pipeline) -> None:
        super().__init__()
        self.module = model
        self.pipe = pipe

    def forward(self, *args: Any, **settings: Any) -> Any:
        raise InputError("a process has only its own stages of the model. Call trainer.evaluate() or predict().")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.pipe.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = None


def make_pipeline(
    model: nn.Module,
    schedule: Schedule,
    loss_fn: Any,
    cut: str | Sequence[int],
    options: Mapping[str, Any],
    rank: int | None,
    device: torch.device,
) -> Pipeline:
    """The pipeline of a model, with the stages of this process on its device.

    Args:
        options: of `Pipeline`.
        rank: of this process; None: it has all stages.
    """
    if any(parameter.is_meta for parameter in model.parameters()):  # the pipeline reads the values, to their place
        weights = getattr(model, WEIGHTS, None)
        if weights is not None:
            weights.device = device
        return Pipeline(model, schedule, loss_fn=loss_fn, cut=cut, **options)
    stages = split(model, schedule.num_stages, cut=cut)
    mesh = options.get("mesh")
    if rank is not None and mesh is not None:
        rank = mesh.coordinate("pp")
    for module, ranks in zip(stages.modules, schedule.placement.replicas, strict=True):
        if rank is None or rank in ranks:
            module.to(device)
    return Pipeline(stages, schedule, loss_fn=loss_fn, **options)


class FirstLoads:
    """A data loader whose batches process 0 loads and all processes get.

    Augmentations and masks that draw random numbers are then the same for the inputs on the first stage and the labels
    on the last.
    """

    def __init__(self, loader: Any, processes: Processes) -> None:
        self._loader, self._processes = loader, processes

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader) if self._processes.rank == 0 else iter(())
        while (batch := self._processes.first_makes(lambda: next(batches, None))) is not None:
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
