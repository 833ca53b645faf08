"""`generate`: text from the model that a run trains."""

from contextlib import ExitStack

import torch

from pipeloom.data.tokenizers import Tokenizer
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.models import loss_fn
from pipeloom.split import Stages
from pipeloom.train.config.inside_stage import samples_multiple, tokens_multiple
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline


def generate(
    config: TrainConfig,
    stages: Stages,
    placement: Placement,
    group: Group,
    tokenizer: Tokenizer,
    through: Pipeline | None = None,
) -> str:
    """``sample_prompt`` and ``sample_tokens`` tokens after it, drawn one by one; every process calls it and gets them.

    Args:
        config: of the run.
        stages, placement: of the model; its parameters are full (unsharded) and up to date.
        group: of all processes; every replica computes the same.
        tokenizer: of the model.
        through: the pipeline that trains, if only it can gather sharded parameters. None: one is made.
    """
    prompt = tokenizer.prompt(config.sample_prompt)
    if not config.sample_tokens:
        return tokenizer.decode(prompt)
    temperature = config.sample_temperature
    context = config.parallel.context_kind if config.parallel.context > 1 else None
    with ExitStack() as stack:
        pipeline = through or stack.enter_context(
            Pipeline(
                stages,
                _one_forward(placement),
                loss_fn=loss_fn,
                transport=config.transport,
                mesh=group.mesh,
                context=context,
            )
        )
        tokens = pipeline.generate(
            torch.tensor([prompt] * samples_multiple(config), device=group.device),
            max_new_tokens=config.sample_tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            seed=config.seed,
            pad_to_multiple_of=tokens_multiple(config),
        )
    return tokenizer.decode(tokens[0].tolist())


def _one_forward(placement: Placement) -> Schedule:
    """One micro-batch through all stages, without backwards."""
    orders = (
        tuple(Action(stage, Op.F, 0) for stage in sorted(stages) if placement.rank_of(stage, 0) == rank)
        for rank, stages in enumerate(placement.stages_of)
    )
    return Schedule(
        name="one forward", num_microbatches=1, placement=placement, orders=tuple(orders), forward_only=True
    )
