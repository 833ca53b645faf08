"""Auxiliary losses and metrics: what F, B and I do in addition (see `pipeloom.autograd`).

F       keeps the values that the stage declared, and a root of the graph of each; on the last stage, the metrics
B, I    start at these roots too, with weight * share * loss scale
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeloom.autograd.auxiliary_losses import Collected
from pipeloom.autograd.loss_metrics import Metric
from pipeloom.autograd.split_backward import Root, root_of
from pipeloom.engine.batch import Batch, Declared, Extent, ForwardKey
from pipeloom.engine.rank_state import DeclaredRoot, RankState
from pipeloom.errors import RunError
from pipeloom.ir import Action, Program
from pipeloom.transport.values import Value


def keep_declared(state: RankState, action: Action, program: Program, found: Collected, output: Value) -> bool:
    """Keep what the F of `action`, with this `output`, declared; returns whether any of it is trained."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    if not state.batch.collects:
        return False
    samples = float(state.samples_in(microbatch, program.schedule.num_microbatches))
    if state.wiring.sliced:
        extent = Extent(*output[1].tolist())
        samples *= (extent.end - extent.start) / extent.length
    values = [loss._replace(value=loss.value.detach()) for loss in found.losses]
    of_loss = state.batch.declared.get((stage, microbatch, piece), Declared())  # the metrics
    state.batch.declared[stage, microbatch, piece] = of_loss._replace(
        samples=samples, losses=values, observed=found.observed
    )
    roots = [
        DeclaredRoot(root_of(loss.value), value.value, value.weight, samples)
        for loss, value in zip(found.losses, values, strict=True)
        if loss.value.requires_grad and not program.schedule.forward_only
    ]
    if roots:
        state.declared[stage, microbatch, piece] = roots
    return bool(roots)


def add_declared(state: RankState, action: Action, roots: list[Root], gradients: list[Tensor]) -> None:
    """Add the roots of the losses that the stage declared, and the gradients in which their backwards start."""
    stage, _, microbatch, piece = action
    assert microbatch is not None
    for root, value, weight, samples in state.declared.pop((stage, microbatch, piece)):
        share = samples / state.all_samples(microbatch)
        roots.append(root)
        gradients.append(torch.full_like(value, weight * share * state.loss_scale))


def keep_metrics(batch: Batch, key: ForwardKey, metrics: Mapping[str, Metric]) -> None:
    """Keep the metrics beside the loss of one micro-batch or slice.

    Raises:
        RunError: earlier ones had other names, or other kinds.
    """
    kinds = {name: metric.weight is None for name, metric in metrics.items()}
    if batch.metric_kinds is None:
        batch.metric_kinds = kinds
    elif kinds != batch.metric_kinds:
        others = sorted(kinds.items() ^ batch.metric_kinds.items())[0][0]
        raise RunError(
            f"loss_fn returned the metrics {sorted(batch.metric_kinds)} for one micro-batch and {sorted(kinds)} for "
            f"another, which differ in {others!r}: must be the same, of the same kinds. Return each for every "
            "micro-batch, with pipeloom.Mean(0.0, 0) where it has no value."
        )
    if metrics:
        batch.declared[key] = Declared(metrics=metrics)
