"""`PipelinedModel`: what Trainer holds in place of the model. `FirstLoads`: a data loader that process 0 reads."""

from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.processes import Processes
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
