"""Evaluation mode of modules, and back."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(stages: Iterable[nn.Module]) -> Iterator[None]:
    """All modules of the stages are in evaluation mode inside the block, and in their own modes after it."""
    stages = list(stages)
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first; a module may do more in train() than set the flag
            if module.training != training:
                module.train(training)
        for module, training in modes:
            module.training = training
