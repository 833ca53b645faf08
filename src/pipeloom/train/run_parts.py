"""What the steps of a run are made with, whether its schedule flushes or streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.output.journal import Journal
from pipeloom.train.output.step_metrics import Predictor
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline

Live = Callable[[int, float, float], None]  # step, loss, tokens a second
Batches = Iterator[tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """One process's part of a run.

    Attributes:
        pipeline, optimizer: of this process.
        predictor: takes in what steps cost.
        config: of the run.
        group: its processes.
        journal: of this process.
    """

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    predictor: Predictor
    config: TrainConfig
    group: Group
    journal: Journal
