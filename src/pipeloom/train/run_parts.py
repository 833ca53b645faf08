"""`RunParts`: one process's part of a run, and how it is made from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.ir import Schedule
from pipeloom.models import GPT, loss_fn, materialize
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.processes.launcher import BlackBox
from pipeloom.split import Stages, split
from pipeloom.train.config.memory import activation_offload, offloads
from pipeloom.train.config.schedule import make_schedule, parse_cut, slice_lengths
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.corpus import Corpus, Sampler, open_corpus
from pipeloom.train.link_costs import measure_data_costs
from pipeloom.train.optimizers import make_optimizer
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.display import skipped_notice
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
        optimizer: over this process's parameters; an `OffloadedOptimizer` where states or parameters are offloaded.
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
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    predictor: Predictor
    sampler: Sampler
    samples_seen: int
    notices: list[str]

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)


def make_run_parts(config: TrainConfig, group: Group, black_box: BlackBox | None) -> RunParts:
    """Make the model, the pipeline and the optimizer of this process; every process calls it."""
    journal = Journal(black_box, Path(config.output_dir) if group.rank == 0 else None)
    journal.enter("setup")
    device, memory, precision = group.device.type, config.memory, config.precision
    schedule, corpus, offloaded = make_schedule(config), open_corpus(config), offloads(config, device)
    stages = _build_stages(config, schedule, corpus, group)
    main_parameters = memory.offload if memory.offload_parameters and offloaded else None
    pipeline = Pipeline(
        stages,
        schedule,
        loss_fn=loss_fn,
        transport=config.transport,
        slices=slice_lengths(config),
        mesh=group.mesh,
        data=config.shared and replace(config.shared, offload=main_parameters),
        precision=config.number_format if precision.dtype != "fp32" else None,
        recompute=memory.recompute,
        offload=activation_offload(config) if offloaded else None,
        blackbox=black_box and black_box.action_buffer,
    )
    shapes = {name: part.shape for name, part in pipeline.state.ranges.items()}
    optimizer = make_optimizer(pipeline.named_parameters(), config.optimizer, shapes)
    if offloaded and (memory.offload_states or memory.offload_parameters):
        optimizer = OffloadedOptimizer(optimizer, memory.offload if memory.offload_states else None)
    notices = skipped_notice(corpus.skipped)
    if memory.offload is not None and not offloaded:
        notices.append("memory.offload=cpu: has no effect, because this run computes on the CPU. Use disk:PATH.")
    scales = precision.dtype == "fp16"
    return RunParts(
        config=config,
        group=group,
        journal=journal,
        schedule=schedule,
        corpus=corpus,
        stages=stages,
        pipeline=pipeline,
        optimizer=optimizer,
        scaler=LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps) if scales else None,
        predictor=Predictor(measure_data_costs(pipeline, group)),
        sampler=Sampler(corpus.num_windows(config.model.sequence_length), config.seed),
        samples_seen=0,
        notices=notices,
    )


def _build_stages(config: TrainConfig, schedule: Schedule, corpus: Corpus, group: Group) -> Stages:
    """The model cut into stages; those of this process have values on its device.

    Initial values depend on the seed and a parameter's name alone, so every layout begins with the same model. A cut by
    measured times is made by process 0, which measures the whole model on one micro-batch.
    """
    sizes, num_stages = config.gpt(corpus.tokenizer.vocabulary_size), schedule.num_stages
    cut = parse_cut(config, num_stages)
    if cut == "time":
        counts: list[int] = []
        if group.rank == 0:
            with torch.device("meta"):
                whole = GPT(sizes)
            materialize(whole, config.seed)
            samples = range(min(config.microbatch_size, corpus.num_windows(sizes.sequence_length)))
            pair = corpus.windows(samples, sizes.sequence_length)
            counts = blocks_of(split(whole, num_stages, cut="time", sample=pair, loss_fn=loss_fn))
        cut = group.gather_json(counts)[0]
    with torch.device("meta"):
        model = GPT(sizes)
    if group.pipeline_rank is None:  # all stages are here: tied parameters stay one parameter
        materialize(model, config.seed, group.device)
        return split(model, num_stages, cut=cut)
    stages = split(model, num_stages, cut=cut)
    for stage in schedule.placement.stages_of[group.pipeline_rank]:
        materialize(stages.modules[stage], config.seed, group.device)
    return stages


def blocks_of(stages: Stages) -> list[int]:
    """The number of blocks in each stage."""
    return [sum(name.startswith("blocks.") for name in layers) for layers in stages.layers]
