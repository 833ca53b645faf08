"""`RunModel`: one process's model and pipeline, made from the configuration."""

from dataclasses import asdict, replace
from typing import Any

import torch

from pipeloom.autograd import use_fp8
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.models import GPT, loss_fn, materialize
from pipeloom.parallel.tensor.parallelize import parallelize
from pipeloom.split import Stages, split
from pipeloom.split.stage_module import StageModule, composite_blocks
from pipeloom.train.config.memory import activation_offload, offloads
from pipeloom.train.config.schedule import make_schedule, parse_cut, slice_lengths
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.samples import Samples
from pipeloom.train.optimizers import HIDDEN, make_optimizer
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline


class RunModel:
    """One process's model and pipeline. On device "meta" they have no values, but say what the process holds.

    Args:
        config: of the run.
        group: its processes.
        vocabulary_size: of a GPT.
        samples: what a cut by measured times is measured on.

    Attributes:
        schedule: of every step.
        num_parameters: ``1,234 parameters``.
        model_state: what checkpoints say about the model; of adapters, "adapters" is their configuration.
        stages: of the model; those of this process have values, the others are on the meta device.
        pipeline: of this process.

    Raises:
        InputError: a cut by measured times without samples.
    """

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        vocabulary_size: int,
        *,
        samples: Samples | None = None,
    ) -> None:
        self.config, self.group = config, group
        self.schedule = make_schedule(config)
        memory, precision, offloaded = config.memory, config.precision, offloads(config, group.device.type)
        loss: Any = loss_fn
        if config.model.pretrained is None:
            self.stages = _build_stages(config, self.schedule, vocabulary_size, samples, group)
            sizes = config.gpt(vocabulary_size)
            self.model_state, self.num_parameters = asdict(sizes), f"{sizes.num_parameters:,} parameters"
        else:
            from pipeloom.train.fine_tuning.model import open_pretrained  # here: imports transformers

            self.stages, loss, self.num_parameters, self.model_state = open_pretrained(config, self.schedule, group)
        for module in self.stages.modules if config.fp8 else ():
            for block in composite_blocks(module) if isinstance(module, StageModule) else [module]:
                use_fp8(block)
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
            compile=config.compile,
            graphs=config.graphs,
            blackbox=group.black_box.action_buffer,
        )

    def new_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer over this process's parameters, as the configuration asks."""
        state = self.pipeline.state
        shapes = {name: part.shape for name, part in state.ranges.items()}
        hidden = _hidden_prefixes(self.stages)
        return make_optimizer(
            self.pipeline.named_parameters(), self.config.optimizer, shapes, state.sharing.blocks, hidden
        )


def _build_stages(
    config: TrainConfig, schedule: Schedule, vocabulary_size: int, samples: Samples | None, group: Group
) -> Stages:
    """The model cut into stages; those of this process have values on its device.

    Initial values depend on the seed and a parameter's name alone, so every layout begins with the same model. A cut by
    measured times is made by process 0, which measures the whole model on one micro-batch.
    """
    sizes, num_stages = config.gpt(vocabulary_size), schedule.num_stages
    cut = parse_cut(config, num_stages)
    if cut == "time":
        if samples is None:
            raise InputError("parallel.cut=time: times are measured by a run. Give blocks per stage, such as 5,3.")
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


def _hidden_prefixes(stages: Stages) -> tuple[str, ...]:
    """The prefixes of the names of parameters in blocks: members of a container, such as ``model.layers.3``."""
    names = (name for layers in stages.layers for name in layers)
    return tuple(f"{name}." for name in names if name.rpartition(".")[2].isdecimal())


def blocks_of(stages: Stages) -> list[int]:
    """The number of blocks in each stage."""
    return [sum(name.startswith(HIDDEN) for name in layers) for layers in stages.layers]
