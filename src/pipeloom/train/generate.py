"""Text generation through the pipeline."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.models import loss_fn
from pipeloom.split import Stages
from pipeloom.train.data.tokenizers import Tokenizer
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline


def generate(
    stages: Stages,
    placement: Placement,
    group: Group,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    sequence_length: int,
    temperature: float,
    seed: int,
    transport: str = "auto",
    through: Pipeline | None = None,
) -> str:
    """`prompt` and `num_tokens` tokens after it, drawn one by one; every process calls it and gets the text.

    The last `sequence_length` tokens go through the pipeline; the rank with the last stage draws the next one from
    softmax(logits / temperature) with its own generator and broadcasts the token. Temperature 0: the likeliest.

    Args:
        stages, placement: of the model; its parameters are full (unsharded) and up to date.
        group: of all processes; every replica computes the same.
        tokenizer: of the model.
        prompt, num_tokens, sequence_length, temperature, seed: see above.
        transport: of the pipeline that is made for it.
        through: the pipeline that trains, if only it can gather sharded parameters. It takes as many equal samples as
            it has micro-batches.
    """
    separator = tokenizer.encode([""]).tolist()
    tokens: list[int] = tokenizer.encode([prompt]).tolist()[: -len(separator)] or separator
    generator = torch.Generator().manual_seed(seed)
    last = placement.rank_of(placement.num_stages - 1, 0)
    with ExitStack() as stack:
        one = _one_forward(placement)
        pipeline = through or stack.enter_context(
            Pipeline(stages, one, loss_fn=loss_fn, transport=transport, mesh=group.mesh)
        )
        schedule = pipeline.schedule
        pipeline.eval()
        for _ in range(num_tokens):
            window = tokens[-sequence_length:]
            padding = [0] * (schedule.num_slices - len(window))  # later tokens do not matter to earlier ones
            inputs = torch.tensor([window + padding] * schedule.num_microbatches, device=group.device)
            logits_BSV = pipeline.forward(inputs if pipeline.needs_inputs else None)
            token = torch.zeros(1, dtype=torch.int64)
            if isinstance(logits_BSV, Tensor):
                token[0] = _draw(logits_BSV[0, len(window) - 1].float().cpu(), temperature, generator)
            tokens.append(int(group.from_rank(last, token)))
    return tokenizer.decode(tokens)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def _one_forward(placement: Placement) -> Schedule:
    """One micro-batch through all stages, without backwards."""
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for stage in range(placement.num_stages):
        orders[placement.rank_of(stage, 0)].append(Action(stage, Op.F, 0))
    return Schedule(
        name="one forward",
        num_microbatches=1,
        placement=placement,
        orders=tuple(map(tuple, orders)),
        forward_only=True,
    )
