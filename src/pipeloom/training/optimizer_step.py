"""`OptimizerStep`: gradients, their norm over all stages, clipping by it, and the update.

    BarrierStep         every rank waits for the norm over all ranks, then updates its parameters
    PostValidatedStep   every rank updates at once and validates the update later (post_validation/)

Both give bitwise the same weights, optimizer states and norms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.parallel.mixed_precision import update_parameters
from pipeloom.parallel.placed import placed_block
from pipeloom.training.clipping import clip_by_norms, gradient_norms
from pipeloom.training.loss_scaler import LEAST_LOSS_SCALE, LossScaler
from pipeloom.training.nonfinite import NonFiniteSearch
from pipeloom.training.optimizers.muon import Muon
from pipeloom.training.pipeline import Pipeline
from pipeloom.transport.values import Value

Numbers = Callable[[], Tensor]
Accept = Callable[[float, float], bool]

# Optimizers of torch whose update of an element depends on other elements.
_NEED_FULL_PARAMETERS = ("Adafactor", "LBFGS", "Muon")


@dataclass(frozen=True, slots=True)
class Rerun:
    """The second run of a step whose loss or gradient norm was not finite.

    Attributes:
        loss, grad_norm: of the first run.
        finite: whether those of the second run are finite: then the first run had a fault of the hardware.
        source: where the first value is that is not finite; None: it was not found in any layer.
        ranks: processes whose gradients were not finite in the first run.
    """

    loss: float
    grad_norm: float
    finite: bool
    source: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one step.

    Attributes:
        loss: the mean over all samples, on every rank.
        grad_norm: the 2-norm of all gradients before clipping.
        applied: False where the loss or the norm is not finite; the weights then stay as they were.
        numbers: the sum over processes of the numbers given to `OptimizerStep.step`; float64.
        skipped: whether only the loss scale was too large for float16; the next step has a smaller scale.
        left_out: whether `BarrierStep`'s `accept` rejected the update; weights and optimizer states stay as they were.
        rerun: of a step that was not finite and ran again, what the second time showed; None where it did not.
    """

    loss: Tensor
    grad_norm: Tensor
    applied: bool
    numbers: Tensor
    skipped: bool = False
    left_out: bool = False
    rerun: Rerun | None = None


def check_optimizer(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError where the optimizer has parameters of another model, or cannot update shards."""
    held = set(pipeline.parameters())
    if any(p not in held for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer has parameters that are not the pipeline's. Make it from pipeline.parameters()."
        )
    cut = any(span.stop - span.start > 0 and not span.is_whole for span in pipeline.state.ranges.values())
    if cut and type(optimizer).__name__ in _NEED_FULL_PARAMETERS:
        raise InputError(
            f"{type(optimizer).__name__} cannot update shards of parameters: its update of an element depends on the "
            'others. Pass data=pipeloom.DataParallel(..., layout="parameters") to Pipeline.'
        )
    if type(optimizer).__name__ in _NEED_FULL_PARAMETERS and not isinstance(optimizer, Muon):
        blocks = {parameter: block.how for parameter in held if (block := placed_block(parameter)) is not None}
        in_blocks = [p for group in optimizer.param_groups for p in group["params"] if p in blocks and blocks[p].axes]
        if in_blocks:
            axes = "+".join(blocks[in_blocks[0]].axes)
            raise InputError(
                f"{type(optimizer).__name__} cannot update blocks of parameters, which mesh axis {axes} cuts: its "
                "update of an element depends on the others. Use pipeloom.Muon, an elementwise optimizer such as "
                "AdamW, or tensor-parallel degree 1."
            )


class OptimizerStep(ABC):
    """Runs steps of a pipeline and updates its parameters.

    Args:
        pipeline: the pipeline to train.
        optimizer: over parameters of `pipeline`, all that this process holds or some.
        max_norm: gradients are scaled down to this 2-norm over all of them.

    Raises:
        InputError: `max_norm` is not positive, or the optimizer has parameters that are not the pipeline's.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf) -> None:
        if not max_norm > 0:
            raise InputError(f"max_norm={max_norm}: must be above 0. Leave it out for no clipping.")
        check_optimizer(pipeline, optimizer)
        self._pipeline, self._optimizer, self._max_norm = pipeline, optimizer, max_norm

    @abstractmethod
    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        """Train on one batch; every rank calls it.

        Args:
            inputs, targets: as for `Pipeline.step`.
            numbers: called after the backward, returns a tensor [n]; its sum over processes is in the update.

        Returns:
            The updates that have become final, at most one: this step's or the one before.
        """

    @abstractmethod
    def settle(self) -> list[Update]:
        """Make all updates final; every rank calls it before weights or optimizer state are read.

        Returns:
            The updates that have become final.
        """


class _Run(NamedTuple):
    loss: Tensor
    norm: Tensor
    numbers: Tensor
    finite: bool
    own_finite: bool  # whether the gradients that this process owns are


class BarrierStep(OptimizerStep):
    """All ranks wait for each other before they update.

    Args:
        sum_over_processes: adds a float64 tensor on the CPU over all processes; by default over the pipeline's group.
        scaler: of the loss, for float16.
        accept: called with finite loss and gradient norm, equal on all ranks; False leaves the update out, and the
            loss scale as it is.
        search: runs a step again whose loss or gradient norm is not finite, unless a smaller loss scale may help.
        retries: whether the result of the second run is used where it is finite.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float = math.inf,
        sum_over_processes: Callable[[Tensor], Tensor] | None = None,
        scaler: LossScaler | None = None,
        accept: Accept | None = None,
        search: NonFiniteSearch | None = None,
        retries: bool = False,
    ) -> None:
        super().__init__(pipeline, optimizer, max_norm=max_norm)
        self._scaler, self._accept = scaler, accept
        self._search, self._retries = search, retries
        self._sum = sum_over_processes or pipeline.executor.connection.sum_over_processes

    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        if self._scaler is not None:
            self._pipeline.loss_scale = self._scaler.scale
        if self._search is not None:
            self._search.begin()
        run = self._run(inputs, targets, numbers)
        rerun = None
        if self._search is not None and not run.finite and not self._may_overflow(run):
            rerun, again = self._run_again(self._search, run, lambda: self._run(inputs, targets, numbers))
            if rerun.finite and self._retries:
                run = again
        loss, norm, finite = run.loss, run.norm, run.finite
        left_out = finite and self._accept is not None and not self._accept(float(loss), float(norm))
        applied = finite and not left_out
        if applied:
            update_parameters(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        skipped = self._scaler is not None and not finite and bool(loss.isfinite())
        if self._scaler is not None and (applied or skipped):
            self._scaler.update(finite=applied)
        return [Update(loss, norm, applied, run.numbers, skipped, left_out, rerun)]

    def _run(self, inputs: Value, targets: Value, numbers: Numbers | None) -> "_Run":
        loss = self._pipeline.step(inputs, targets)
        norms = gradient_norms(self._pipeline)
        own_finite = bool(norms.isfinite().all())
        own = numbers() if numbers is not None else torch.empty(0)
        summed = self._sum(torch.cat([norms.flatten(), own.double()]))
        norm = clip_by_norms(self._pipeline, summed[: norms.numel()].view_as(norms), self._max_norm)
        return _Run(loss, norm, summed[norms.numel() :], bool(loss.isfinite()) and bool(norm.isfinite()), own_finite)

    def _may_overflow(self, run: "_Run") -> bool:
        """Whether the loss scale may be too large."""
        return self._scaler is not None and bool(run.loss.isfinite()) and self._scaler.scale >= LEAST_LOSS_SCALE

    def _run_again(self, search: NonFiniteSearch, run: "_Run", again: Callable[[], "_Run"]) -> tuple[Rerun, "_Run"]:
        self._optimizer.zero_grad(set_to_none=True)
        with search.searching() as found:
            second = again()
        source, ranks = search.first(found, own_finite=run.own_finite)
        return Rerun(float(run.loss), float(run.norm), second.finite, source, ranks), second

    def settle(self) -> list[Update]:
        return []
