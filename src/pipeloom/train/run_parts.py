"""`RunParts`: one process's part of a run, and how it is made from the configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.ir import Schedule
from pipeloom.models import GPT, GPTConfig, loss_fn, materialize
from pipeloom.processes.black_box import BlackBox
from pipeloom.split import Stages, split
from pipeloom.train.checkpoint.exchange import Exchange
from pipeloom.train.config.memory import activation_offload, offloads
from pipeloom.train.config.schedule import make_schedule, parse_cut, slice_lengths
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.config.validate import open_corpus
from pipeloom.train.data.sampler import Corpus, Sampler
from pipeloom.train.link_costs import measure_data_costs
from pipeloom.train.offload import data_parallel, offload_notices, with_offload
from pipeloom.train.optimizers import make_optimizer
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.notices import skipped_notice
from pipeloom.train.output.step_metrics import Predictor
from pipeloom.train.process_group import Group
from pipeloom.training import LossScaler, Pipeline

Live = Callable[[int, float, float], None]  # step, loss, tokens per second
Batches = Iterator[tuple[Tensor | None, Tensor | None]]


@dataclass(slots=True, kw_only=True)
class RunParts:
    """One process's part of a run.

    Attributes:
        config: of the run.
        group: its processes.
        journal: of this process.
        schedule: of every step.
        corpus: the tokens.
        stages: of the model; those of this process have values, the others are on the meta device.
        pipeline: of this process.
        base_optimizer: over this process's parameters; checkpoints hold its states.
        optimizer: makes the steps: `base_optimizer`, or an `OffloadedOptimizer` around it.
        scaler: of the loss, for fp16.
        predictor: of steps, from the costs of earlier ones.
        sampler: the order of samples.
        samples_seen: samples trained on so far, over all runs.
        notices: lines to show before the first step.
    """

    config: TrainConfig
    group: Group
    journal: Journal
    schedule: Schedule
    corpus: Corpus
    stages: Stages
    pipeline: Pipeline
    base_optimizer: torch.optim.Optimizer
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    predictor: Predictor
    sampler: Sampler
    samples_seen: int
    notices: list[str]

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def transport(self) -> str:
        return "loopback" if self.config.local else self.config.parallel.transport

    @property
    def config_of_stages(self) -> TrainConfig:
        """`config` with the blocks of every stage in place of a cut by measured times."""
        if self.config.parallel.cut != "time":
            return self.config
        cut = ",".join(map(str, _blocks(self.stages)))
        return dataclasses.replace(self.config, parallel=dataclasses.replace(self.config.parallel, cut=cut))


def make_run_parts(config: TrainConfig, group: Group, black_box: BlackBox | None) -> RunParts:
    """Make the model, the pipeline and the optimizer of this process; every process calls it."""
    journal = Journal(black_box, Path(config.output_dir) if group.rank == 0 else None)
    journal.enter("setup")
    device = group.device.type
    schedule, corpus = make_schedule(config), open_corpus(config)
    stages = _build_stages(config, schedule, corpus, group, group.device, group.pipeline_rank)
    precision = config.precision
    pipeline = Pipeline(
        stages,
        schedule,
        loss_fn=loss_fn,
        transport="loopback" if config.local else config.parallel.transport,
        slices=slice_lengths(config),
        mesh=group.mesh,
        data=data_parallel(config, device),
        precision=config.number_format if precision.dtype != "fp32" else None,
        recompute=config.memory.recompute,
        offload=activation_offload(config) if offloads(config, device) else None,
        blackbox=black_box and black_box.action_buffer,
    )
    shapes = {name: part.shape for name, part in pipeline.state.ranges.items()}
    optimizer = make_optimizer(pipeline.named_parameters(), config.optimizer, shapes)
    scales = precision.dtype == "fp16"
    return RunParts(
        config=config,
        group=group,
        journal=journal,
        schedule=schedule,
        corpus=corpus,
        stages=stages,
        pipeline=pipeline,
        base_optimizer=optimizer,
        optimizer=with_offload(optimizer, config, device),
        scaler=LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps) if scales else None,
        predictor=Predictor(measure_data_costs(pipeline, group)),
        sampler=Sampler(corpus.num_windows(config.model.sequence_length), config.seed),
        samples_seen=0,
        notices=skipped_notice(corpus.skipped) + offload_notices(config, device),
    )


def _build_stages(
    config: TrainConfig,
    schedule: Schedule,
    corpus: Corpus,
    exchange: Exchange,
    device: torch.device,
    rank: int | None,
) -> Stages:
    """The model cut into stages; those of pipeline rank `rank` (None: all) have values on `device`.

    Initial values depend on the seed and a parameter's name alone, so every layout begins with the same model.
    """
    sizes = config.gpt(corpus.vocabulary_size)
    cut = parse_cut(config, schedule.num_stages)
    if cut == "time":
        cut = _agree_on_cut(config, sizes, schedule, corpus, exchange)
    with torch.device("meta"):
        model = GPT(sizes)
    if rank is None:  # all stages are here: tied parameters stay one parameter
        materialize(model, config.seed, device)
        return split(model, schedule.num_stages, cut=cut)
    stages = split(model, schedule.num_stages, cut=cut)
    for stage in schedule.placement.stages_of[rank]:
        materialize(stages.modules[stage], config.seed, device)
    return stages


def _blocks(stages: Stages) -> list[int]:
    """The number of blocks in each stage."""
    return [sum(name.startswith("blocks.") for name in layers) for layers in stages.layers]


def _agree_on_cut(
    config: TrainConfig, sizes: GPTConfig, schedule: Schedule, corpus: Corpus, exchange: Exchange
) -> list[int]:
    """Process 0 measures the whole model on one micro-batch and broadcasts the blocks per stage."""
    counts: list[int] = []
    if exchange.rank == 0:
        with torch.device("meta"):
            model = GPT(sizes)
        materialize(model, config.seed)
        samples = range(min(config.microbatch_size, corpus.num_windows(sizes.sequence_length)))
        pair = corpus.windows(samples, sizes.sequence_length)
        stages = split(model, schedule.num_stages, cut="time", sample=pair, loss_fn=loss_fn)
        counts = _blocks(stages)
    agreed: list[int] = json.loads(exchange.all_gather(json.dumps(counts).encode())[0])
    return agreed
