"""The norm of all gradients of a model, and clipping by it."""

import torch
from torch import Tensor

from pipeloom.training.pipeline import Pipeline


def gradient_norms(pipeline: Pipeline, rank: int | None = None) -> Tensor:
    """The 2-norms of the gradients that this process owns, or one of its ranks, to be summed over processes.

    Shape [2, parameters of the model], float64: norms in the model's order in row 0, ones where there is a gradient in
    row 1. Entries are zero for parameters of other processes, for parameters that a lower rank holds too and, where
    data-parallel replicas have the same gradient, on all replicas but the first. Where replicas hold shards, or several
    processes share a stage, row 0 has squares of norms over the elements that this process owns.
    """
    norms = torch.zeros(2, len(pipeline.state.parameter_names), dtype=torch.float64)
    state = pipeline.state
    sharing, names, ranges = state.sharing, state.parameter_names, state.ranges
    owned = [
        (position, values)
        for position, p in state.owned_parameters(rank)
        if p.grad is not None and sharing.counts(p)
        for values in sharing.blocks.owned(p, p.grad, ranges.get(names[position]))
    ]
    if owned:
        positions = torch.tensor([position for position, _ in owned])
        # of a 16-bit gradient in 32 bits
        each = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for _, g in owned]
        if len({norm.device for norm in each}) > 1:
            each = [norm.cpu() for norm in each]
        found = torch.stack([norm.double() for norm in each]).cpu()  # the host waits for the device once
        norms[0].index_add_(0, positions, found.square() if _has_squares(pipeline) else found)
        norms[1, positions] = 1.0
    return norms


def _has_squares(pipeline: Pipeline) -> bool:
    """Whether `gradient_norms` has squares, which add up over the processes that hold parts of a parameter."""
    return pipeline.state.sharing.sharded or pipeline.state.sharing.blocks.divides


def total_norm(pipeline: Pipeline, norms: Tensor) -> Tensor:
    """The 2-norm over all parameters, from a sum of `gradient_norms`."""
    # Parameters without a gradient are left out: zeros would change the order in which the others add up.
    found = norms[0, norms[1] > 0]
    if _has_squares(pipeline):
        found = found.sqrt()
    norm: Tensor = torch.linalg.vector_norm(found.to(pipeline.state.norm_dtype))
    return norm


def clip_by_norms(pipeline: Pipeline, norms: Tensor, max_norm: float) -> Tensor:
    """The second half of `clip_grad_norm`: clip by `gradient_norms` summed over processes."""
    norm = total_norm(pipeline, norms)
    torch.nn.utils.clip_grads_with_norm_(list(pipeline.parameters()), max_norm, norm)
    return norm


def clip_grad_norm(pipeline: Pipeline, max_norm: float) -> Tensor:
    """Scale all gradients of the model so that their common 2-norm is at most `max_norm`.

    Every rank calls it after `Pipeline.step`. The norm is taken over all stages, each parameter once (tied ones and
    replicas too), from the parameters' norms in the model's order: bitwise what torch.nn.utils.clip_grad_norm_ gives
    for the uncut model.

    Returns:
        The norm before clipping, on every rank.
    """
    norms = pipeline.executor.connection.sum_over_processes(gradient_norms(pipeline))
    return clip_by_norms(pipeline, norms, max_norm)
