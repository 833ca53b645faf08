"""`generate`: text from the model that a run trains."""

from contextlib import ExitStack

import torch
from torch import Tensor

from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.models import loss_fn
from pipeloom.split import Stages
from pipeloom.train.config.inside_stage import samples_multiple, tokens_multiple
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.text import Tokenizer
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

    The last ``model.sequence_length`` tokens go through the pipeline; the rank with the last stage draws the next one
    from softmax(logits / ``sample_temperature``) with its own generator and broadcasts the token. Temperature 0: the
    likeliest.

    Args:
        config: of the run.
        stages, placement: of the model; its parameters are full (unsharded) and up to date.
        group: of all processes; every replica computes the same.
        tokenizer: of the model.
        through: the pipeline that trains, if only it can gather sharded parameters. It takes as many equal samples as
            it has micro-batches. None: one is made.
    """
    separator = tokenizer.encode([""]).tolist()
    tokens: list[int] = tokenizer.encode([config.sample_prompt]).tolist()[: -len(separator)] or separator
    generator, temperature = torch.Generator().manual_seed(config.seed), config.sample_temperature
    context = config.parallel.context_kind if config.parallel.context > 1 else None
    last = placement.rank_of(placement.num_stages - 1, 0)
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
        schedule, multiple = pipeline.schedule, tokens_multiple(config)
        num_samples = schedule.num_microbatches * samples_multiple(config)
        pipeline.eval()
        for _ in range(config.sample_tokens):
            window = tokens[-config.model.sequence_length :]
            length = -(-max(len(window), schedule.num_slices) // multiple) * multiple
            padding = [0] * (length - len(window))  # later tokens do not matter to earlier ones
            inputs = torch.tensor([window + padding] * num_samples, device=group.device)
            logits_BSV = pipeline.forward(inputs if pipeline.needs_inputs else None)
            token = torch.zeros(1, dtype=torch.int64)
            if isinstance(logits_BSV, Tensor):
                logits = logits_BSV[0, len(window) - 1].float().cpu()
                if temperature == 0:
                    token[0] = logits.argmax()
                else:
                    token[0] = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)[0]
            tokens.append(int(group.from_rank(last, token)))
    return tokenizer.decode(tokens)


def _one_forward(placement: Placement) -> Schedule:
    """One micro-batch through all stages, without backwards."""
    orders = (
        tuple(Action(stage, Op.F, 0) for stage in sorted(stages) if placement.rank_of(stage, 0) == rank)
        for rank, stages in enumerate(placement.stages_of)
    )
    return Schedule(
        name="one forward", num_microbatches=1, placement=placement, orders=tuple(orders), forward_only=True
    )
