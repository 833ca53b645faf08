"""`RunParts`: one process's model, pipeline and optimizer, made from the configuration."""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeloom.ir import Schedule
from pipeloom.models import GPT, loss_fn, materialize
from pipeloom.models.gpt import SEES_THE_FUTURE
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.parallel.tensor.parallelize import parallelize
from pipeloom.processes.black_box import BlackBox
from pipeloom.split import Stages, split
from pipeloom.train.config.memory import activation_offload, offloads
from pipeloom.train.config.schedule import make_schedule, parse_cut, slice_lengths
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.corpus import Sampler
from pipeloom.train.data.opening import open_samples
from pipeloom.train.data.samples import Samples
from pipeloom.train.data_parallel_costs import measure_data_costs
from pipeloom.train.optimizers import HIDDEN, make_optimizer
from pipeloom.train.output.directory import Journal
from pipeloom.train.output.step_metrics import Predictor
from pipeloom.train.process_group import Group
from pipeloom.training import LossScaler, Pipeline
from pipeloom.transport.values import Value

Live = Callable[[int, float, float], None]  # step, loss, tokens per second


class TokenBatch(NamedTuple):
    """What a process reads of a global batch: None where it reads nothing. Its tokens, without padding, on all."""

    inputs: Value
    targets: Value
    num_tokens: int


Batches = Iterator[TokenBatch]


class RunParts:
    """One process's part of a run: every process makes its model, pipeline and optimizer.

    Attributes:
        config: of the run.
        output_dir: its output directory.
        group: its processes.
        journal: of this process.
        schedule: of every step.
        samples: the data.
        num_parameters: ``1,234 parameters``.
        model_state: what checkpoints say about the model; of adapters, "adapters" is their configuration.
        stages: of the model; those of this process have values, the others are on the meta device.
        pipeline: of this process.
        optimizer: over this process's parameters; an `OffloadedOptimizer` where states or parameters are offloaded.
        scaler: of the loss, for fp16.
        predictor: of steps, from the costs of earlier ones.
        sampler: the order of samples.
        samples_seen: samples trained on so far, over all runs.
        notices: lines to show before the first step.
    """

    def __init__(self, config: TrainConfig, group: Group, black_box: BlackBox | None) -> None:
        self.config, self.group, self.output_dir = config, group, Path(config.output_dir)
        self.journal = Journal(black_box, self.output_dir if group.rank == 0 else None)
        self.journal.enter("setup")
        memory, precision, offloaded = config.memory, config.precision, offloads(config, group.device.type)
        self.schedule, self.samples = make_schedule(config), open_samples(config)
        warnings.filterwarnings("ignore", ".* " + SEES_THE_FUTURE)  # of each process: it is a notice below
        loss: Any = loss_fn
        if config.model.pretrained is None:
            self.stages = _build_stages(config, self.schedule, self.samples, group)
            sizes = config.gpt(self.samples.tokenizer.vocabulary_size)
            self.model_state, self.num_parameters = asdict(sizes), f"{sizes.num_parameters:,} parameters"
        else:
            from pipeloom.train.fine_tuning.model import open_pretrained  # here: imports transformers

            self.stages, loss, self.num_parameters, self.model_state = open_pretrained(config, self.schedule, group)
        main_parameters = memory.offload if memory.offload_parameters and offloaded else None
        self.pipeline = Pipeline(
            self.stages,
            self.schedule,
            loss_fn=loss,
            transport=config.transport,
            slices=slice_lengths(config),
            mesh=group.mesh,
            context=config.parallel.context_kind if config.parallel.context > 1 else None,
            data=config.shared and replace(config.shared, offload=main_parameters),
            precision=config.number_format if precision.dtype != "fp32" else None,
            recompute=memory.recompute,
            offload=activation_offload(config) if offloaded else None,
            blackbox=black_box and black_box.action_buffer,
        )
        shapes = {name: part.shape for name, part in self.pipeline.state.ranges.items()}
        blocks = self.pipeline.state.sharing.blocks
        self.optimizer = make_optimizer(
            self.pipeline.named_parameters(), config.optimizer, shapes, blocks, hidden_prefixes(self.stages)
        )
        if offloaded and (memory.offload_states or memory.offload_parameters):
            self.optimizer = OffloadedOptimizer(self.optimizer, memory.offload if memory.offload_states else None)
        self.scaler: LossScaler | None = None
        if precision.dtype == "fp16":
            self.scaler = LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps)
        self.predictor = Predictor(measure_data_costs(self.pipeline, group) if config.parameter_replicas > 1 else None)
        self.sampler = Sampler(self.samples.num_samples(), config.seed)
        self.samples_seen = 0
        self.notices = list(self.samples.notices)
        self.notices += _slow_links(group)
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


def _build_stages(config: TrainConfig, schedule: Schedule, samples: Samples, group: Group) -> Stages:
    """The model cut into stages; those of this process have values on its device.

    Initial values depend on the seed and a parameter's name alone, so every layout begins with the same model. A cut by
    measured times is made by process 0, which measures the whole model on one micro-batch.
    """
    sizes, num_stages = config.gpt(samples.tokenizer.vocabulary_size), schedule.num_stages
    cut = parse_cut(config, num_stages)
    if cut == "time":
        counts: list[int] = []
        if group.rank == 0:
            with torch.device("meta"):
                whole = GPT(sizes)
            materialize(whole, config.seed)
            pair = samples.batch(range(min(config.microbatch_size, samples.num_samples())), 1)
            counts = blocks_of(split(whole, num_stages, cut="time", sample=pair, loss_fn=loss_fn))
        cut = group.gather_json(counts)[0]
    with torch.device("meta"):
        model = GPT(sizes)
    if group.mesh is not None and (config.parallel.tensor > 1 or config.parallel.expert > 1):
        given = config.parallel.tensor_depth
        depth: dict[str, Any] = {} if given is None else {"depth": given}
        parallelize(
            model,
            group.mesh,
            sequence=config.parallel.sequence,
            layout=config.parallel.tensor_layout,
            exchange=config.parallel.expert_exchange,
            **depth,
        )
    if group.pipeline_rank is None:  # all stages are here: tied parameters stay one parameter
        materialize(model, config.seed, group.device)
        return split(model, num_stages, cut=cut)
    stages = split(model, num_stages, cut=cut)
    for stage in schedule.placement.stages_of[group.pipeline_rank]:
        materialize(stages.modules[stage], config.seed, group.device)
    return stages


def hidden_prefixes(stages: Stages) -> tuple[str, ...]:
    """The prefixes of the names of parameters in blocks: members of a container, such as ``model.layers.3``."""
    names = (name for layers in stages.layers for name in layers)
    return tuple(f"{name}." for name in names if name.rpartition(".")[2].isdecimal())


def blocks_of(stages: Stages) -> list[int]:
    """The number of blocks in each stage."""
    return [sum(name.startswith(HIDDEN) for name in layers) for layers in stages.layers]
