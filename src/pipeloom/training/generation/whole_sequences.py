"""Generation by forwards of whole sequences: for stages that share out the tokens or the samples of a forward.

These are slices, context and sequence parallelism, and grids of tensor parallelism. Padding on the right does not
change the logits of a causal model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.engine.executor import Executor
from pipeloom.training.generation.decoding import token_channels
from pipeloom.training.generation.sampling import Draws
from pipeloom.training.generation.sequences import Sequences
from pipeloom.transport.interface import Channel, Lane
from pipeloom.transport.values import Value, flatten, unflatten


def continue_whole(
    sequences: Sequences,
    forward: Callable[[Tensor], Value],
    executor: Executor,
    *,
    multiple: int,
    generator: torch.Generator | None,
    stops: bool,
) -> Tensor:
    """Continue sequences, one forward of the pipeline per token; every process calls it.

    Args:
        sequences: of the whole batch.
        forward: see `Pipeline.forward`.
        executor: of the pipeline, with the channels of tokens open.
        multiple: divides the length of every forward.
        stops: whether to stop once all have ended.

    Returns:
        Prompts and new tokens.
    """
    draws = Draws(len(sequences.ids), 1, generator)
    least = executor.programs.train.schedule.num_slices
    for number in range(sequences.max_new_tokens):
        window: Tensor = sequences.inputs(torch.nn.Identity())
        length = window.shape[1]
        padded = -(-max(length, least) // multiple) * multiple
        output: Any = forward(F.pad(window, (0, padded - length)))
        chosen = None
        if output is not None:
            logits = output["logits"] if isinstance(output, Mapping) else output
            chosen = sequences.choose(logits[:, :length], draws, 0, number)
        with executor.ended_by_errors():
            executor.open_channels(token_channels(executor))  # in the first turn, when all ranks are known to be here
            tokens, ended = _shared(executor, chosen)
        sequences.append(tokens, ended=ended)
        if ended and stops:
            break
    return sequences.ids


def _shared(executor: Executor, chosen: tuple[Tensor, bool] | None) -> Any:
    """The choice of the first rank with the last stage, on every rank."""
    rank, place = executor.connection.rank, executor.programs.forward.placement
    holder, transport = place.replicas[-1][0], executor.connection.transport
    if rank is None:
        return chosen
    if rank != holder:
        message = transport.incoming(Channel(holder, rank, Lane.RESULT)).receive()
        return unflatten(message.layout, message.tensors)
    value = flatten(chosen)
    for peer in range(place.num_ranks):
        if peer != rank:
            transport.outgoing(Channel(rank, peer, Lane.RESULT)).send(*value)
    transport.end_step()
    return chosen
