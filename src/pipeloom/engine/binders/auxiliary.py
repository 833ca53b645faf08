"""Auxiliary losses: what F, B and I do in addition (see `pipeloom.autograd.auxiliary_losses`).

F       keeps the values that the stage declared, and a root of the graph of each
B, I    start at these roots too, with weight * share * loss scale
"""

import torch
from torch import Tensor

from pipeloom.autograd.auxiliary_losses import Collected
from pipeloom.autograd.split_backward import Root, root_of
from pipeloom.engine.batch import Declared, Extent
from pipeloom.engine.rank_state import DeclaredRoot, RankState
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
    state.batch.declared[stage, microbatch, piece] = Declared(samples, values, found.observed)
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
