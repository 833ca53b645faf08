"""Measures trial steps (`pipeloom.plan.local.trials`) with all processes of a run."""

import gc
from collections.abc import Sequence
from math import inf
from time import perf_counter

import torch

from pipeloom.plan.local.trials import STEPS, WARM_UP, measured
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.process_group import Group, with_layout
from pipeloom.train.run_model import RunModel
from pipeloom.training import BarrierStep


def measure_trials(
    configs: Sequence[TrainConfig], predicted: Sequence[float], first: int, group: Group, vocabulary_size: int
) -> list[list[float]]:
    """Seconds of steps of each configuration on random tokens; every process calls it.

    Args:
        configs: of a run whose processes are in no mesh yet. One has memory at a time.
        predicted: seconds per step of each.
        first: configurations that take the first turn.
        group: its processes.
        vocabulary_size: of the model.

    Returns:
        Of each step the seconds of the slowest process, the same on every process; of those that run none, nothing.
    """

    def seconds(number: int) -> list[float]:
        config = configs[number]
        layout = with_layout(group, config)
        with torch.random.fork_rng(devices=[]):  # ranks along tp draw the same numbers
            torch.manual_seed(0)
            own = _seconds(RunModel(config, layout, vocabulary_size), config, group)
        every = group.gather_json(own)
        if layout.mesh is not None:
            layout.mesh.close()
        gc.collect()
        return list(map(max, zip(*every, strict=True)))

    return measured(predicted, seconds, first)


def _seconds(run: RunModel, config: TrainConfig, group: Group) -> list[float]:
    """Of this process: of the steps behind those that warm up."""
    stepper = BarrierStep(run.pipeline, run.new_optimizer(), max_norm=config.optimizer.clip_norm or inf)
    model, draws = run.model_state, torch.Generator().manual_seed(run.group.replica)
    sizes = 2, config.batch.size // config.data_degree, model["sequence_length"]
    inputs, targets = torch.randint(model["vocabulary_size"], sizes, generator=draws).to(group.device)
    found = []
    for _ in range(WARM_UP + STEPS):
        group.gather_json(None)  # a barrier
        start = perf_counter()
        stepper.step(inputs, targets)
        found.append(perf_counter() - start)
    run.pipeline.close()
    return found[WARM_UP:]
