"""What runs in each process: some training steps of stages that wait."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from benchmarks.common.workloads import WaitingStage
from torch import Tensor, nn

import pipeloom as pl

NUM_RANKS, NUM_MICROBATCHES = 4, 8
SECONDS = (0.010, 0.010, 0.010)  # F, I and W of one rank's share of the model
# The largest gradient norm: never reached, or always, so that no rank ever does the right thing at once but the last.
SYSTEMS = {
    "barrier": (pl.BarrierStep, 1e9),
    "validated later": (pl.PostValidatedStep, 1e9),
    "validated later, always wrong": (pl.PostValidatedStep, 1e-9),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(NUM_MICROBATCHES, 4, generator=generator), torch.zeros(NUM_MICROBATCHES, 4)


class Answer(NamedTuple):
    """What one rank says of some steps in a row."""

    seconds_a_step: float  # from the start of one to the start of the next, the mean
    weights: dict[str, list[float]]
    num_repeats: int


class Subject:
    """One rank of a crew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def run(self, name: str, system: str, num_steps: int) -> Answer:
        """Train from the same weights each time."""
        kind, max_norm = SYSTEMS[system]
        schedule = pl.schedules.build(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
        torch.manual_seed(7)
        forward, backward, weight = (seconds / schedule.placement.num_chunks for seconds in SECONDS)
        model = [WaitingStage((forward, backward, weight)) for _ in range(schedule.num_stages)]
        with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss) as pipe:
            stepper = kind(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9), max_norm=max_norm)
            stepper.step(*batch())  # allocates and connects
            stepper.settle()
            starts = []
            for _ in range(num_steps + 1):
                starts.append(time.monotonic())
                stepper.step(*batch())
            stepper.settle()
            weights = {key: parameter.tolist() for key, parameter in pipe.named_parameters()}
        repeats = stepper.num_repeats if isinstance(stepper, pl.PostValidatedStep) else 0
        return Answer((starts[-1] - starts[0]) / num_steps, weights, repeats)
