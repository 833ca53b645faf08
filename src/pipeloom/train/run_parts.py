"""`RunParts`: one process's model, pipeline, data and optimizer, made from the configuration."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.data.sampler import Sampler
from pipeloom.models.gpt import SEES_THE_FUTURE
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.processes.rendezvous import open_store
from pipeloom.train.config.memory import offloads
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.opening import open_samples
from pipeloom.train.data.samples import Samples
from pipeloom.train.data_parallel_costs import measure_data_costs
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.recent_band import RecentBand
from pipeloom.train.output.step_metrics import Predictor
from pipeloom.train.process_group import Group
from pipeloom.train.run_model import RunModel
from pipeloom.training import LossScaler
from pipeloom.transport.values import Value

Live = Callable[[int, float, float], None]  # step, loss, tokens per second


class TokenBatch(NamedTuple):
    """What a process reads of a global batch: None where it reads nothing. Its tokens, without padding, on all."""

    inputs: Value
    targets: Value
    num_tokens: int


Batches = Iterator[TokenBatch]


class RunParts(RunModel):
    """One process's part of a run: every process makes its model, pipeline and optimizer.

    Args:
        config, group: of the run.
        samples: the data, if it is open already.

    Attributes:
        output_dir: its output directory.
        journal: of this process.
        samples: the data.
        optimizer: over this process's parameters; an `OffloadedOptimizer` where states or parameters are offloaded.
        scaler: of the loss, for fp16.
        predictor: of steps, from the costs of earlier ones.
        sampler: the order of samples.
        samples_seen: samples trained on so far, over all runs, without those that are passed over.
        checkpoint_key: signs checkpoints; None: they have no signature.
        band: losses and gradient norms of recent steps.
        notices: lines to show before the first step.
    """

    def __init__(self, config: TrainConfig, group: Group, samples: Samples | None = None) -> None:
        self.output_dir = Path(config.output_dir)
        self.journal = Journal(
            group.black_box, self.output_dir if group.rank == 0 else None, keeps_rows=config.background_saves
        )
        self.journal.enter("setup")
        memory, offloaded = config.memory, offloads(config, group.device.type)
        self.samples = open_samples(config) if samples is None else samples
        warnings.filterwarnings("ignore", ".* " + SEES_THE_FUTURE)  # of each process: it is a notice below
        super().__init__(config, group, self.samples.tokenizer.vocabulary_size, samples=self.samples)
        self.optimizer = self.new_optimizer()
        if offloaded and (memory.offload_states or memory.offload_parameters):
            self.optimizer = OffloadedOptimizer(self.optimizer, memory.offload if memory.offload_states else None)
        self.scaler: LossScaler | None = None
        if (precision := config.precision).dtype == "fp16":
            self.scaler = LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps)
        self.predictor = Predictor(measure_data_costs(self.pipeline, group) if config.parameter_replicas > 1 else None)
        self.sampler = Sampler(self.samples.num_samples(), config.seed, mixture=self.samples.mixture)
        self.checkpoint_key = CheckpointKey.read(config.checkpoint_key_file)
        self.samples_seen = 0
        self.band = RecentBand()
        self.notices = list(self.samples.notices)
        self.notices += _slow_links(group)
        if group.processes_per_device > 1:
            name = torch.cuda.get_device_name(group.device)
            self.notices.append(f"{group.processes_per_device} processes share GPU {group.device.index} ({name})")
        if group.rank == 0 and (line := open_store(os.environ)) is not None:
            self.notices.append(line)
        if config.model.experts and config.model.router == "expert-choice":
            self.notices.append(f"model.router=expert-choice: {SEES_THE_FUTURE}")
        if memory.offload is not None and not offloaded:
            self.notices.append(
                "memory.offload=cpu: has no effect, because this run computes on the CPU. Use disk:PATH."
            )


def _slow_links(group: Group) -> list[str]:
    """Lines about mesh axes that communicate in each layer and between nodes, under torchrun."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if group.mesh is None or not local.isdecimal() or int(local) < 1:
        return []
    names = {"tp": "tensor", "cp": "context", "ep": "expert"}
    return [
        f"parallel.{name}={group.mesh.degree(axis)}: communicates in each layer, and {axis} ranks are on several nodes "
        f"of {local} processes, with slower links. Lower it to {local} or less, or put "
        f"{'its axes' if axis == 'ep' else axis} last in parallel.order."
        for axis, name in names.items()
        if group.mesh.shape.crosses_nodes(axis, int(local))
    ]
