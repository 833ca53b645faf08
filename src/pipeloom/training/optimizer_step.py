"""One training step: gradients, their norm over all stages, clipping by it, and the update.

    BarrierStep         every rank waits for the norm over all ranks, then updates its parameters
    PostValidatedStep   every rank updates at once and validates the update later (post_validation/)

Both give bitwise the same weights, optimizer states and norms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.parallel.mixed_precision import update_parameters
from pipeloom.parallel.placed import placed_block
from pipeloom.training.pipeline import Pipeline
from pipeloom.transport.values import Value

Numbers = Callable[[], Tensor]

# Optimizers of torch whose update of an element depends on other elements.
_NEED_FULL_PARAMETERS = ("Adafactor", "LBFGS", "Muon")


def gradient_norms(pipeline: Pipeline, rank: int | None = None) -> Tensor:
    """The 2-norms of the gradients that this process owns, or one of its ranks, to be summed over processes.

    Shape [2, parameters of the model], float64: norms in the model's order in row 0, ones where there is a gradient in
    row 1. Entries are zero for parameters of other processes, for parameters that a lower rank holds too and, where all
    data-parallel replicas have the same gradients, on all replicas but the first. Where replicas hold shards, or
    several processes share a stage, row 0 has squares of norms over the elements that this process owns.
    """
    norms = torch.zeros(2, len(pipeline.state.parameter_names), dtype=torch.float64)
    state = pipeline.state
    sharing, names, ranges = state.sharing, state.parameter_names, state.ranges
    if sharing.replica > 0 and not sharing.sharded:
        return norms
    owned = [
        (position, values)
        for position, p in state.owned_parameters(rank)
        if p.grad is not None
        for values in sharing.blocks.owned(p, p.grad, ranges.get(names[position]))
    ]
    if owned:
        positions = torch.tensor([position for position, _ in owned])
        # of a 16-bit gradient in 32 bits
        each = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for _, g in owned]
        found = torch.stack([norm.double().cpu() for norm in each])
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


class LossScaler:
    """A dynamic loss scale (mixed precision training, arXiv:1710.03740, section 3.2), like torch.amp.GradScaler.

    Small gradients vanish in float16 and large ones overflow. The loss is therefore multiplied by the scale before the
    backward, and gradients are divided by it before the update. An update with gradients that are not finite is
    skipped, and the scale halves; after `growth_steps` finite updates it doubles. All ranks decide by the norm over all
    gradients, so they agree.

    Args:
        scale: the initial scale; a power of two, so that scaling is exact.
        growth_steps: the number of finite updates after which the scale doubles.

    Attributes:
        scale: the scale of the next step.
        num_skipped: updates skipped so far.

    Raises:
        InputError: `scale` is not finite and positive, or `growth_steps` is below 1.
    """

    def __init__(self, scale: float = 65536.0, *, growth_steps: int = 2000) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"scale={scale}: must be finite and above 0. Use a power of two.")
        if growth_steps < 1:
            raise InputError(f"growth_steps={growth_steps}: must be at least 1.")
        self.scale = scale
        self.growth_steps = growth_steps
        self.num_skipped = 0
        self._num_finite = 0  # since the factor last changed

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to whether a step's gradients were finite. Every rank calls it with the same value."""
        if not finite:
            self.num_skipped += 1
            self.scale, self._num_finite = self.scale / 2, 0
            return
        self._num_finite += 1
        if self._num_finite == self.growth_steps:
            self.scale, self._num_finite = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "num_finite": self._num_finite, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.scale = float(state["scale"])
        self._num_finite, self.num_skipped = int(state["num_finite"]), int(state["num_skipped"])


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one step.

    Attributes:
        loss: the mean over all samples, on every rank.
        grad_norm: the 2-norm of all gradients before clipping.
        applied: False where the loss or the norm is not finite; the weights then stay as they were.
        numbers: the sum over processes of the numbers given to `OptimizerStep.step`; float64.
        skipped: whether only the loss scale was too large for float16; the next step has a smaller scale.
    """

    loss: Tensor
    grad_norm: Tensor
    applied: bool
    numbers: Tensor
    skipped: bool = False


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
    if type(optimizer).__name__ in _NEED_FULL_PARAMETERS:
        blocks = {parameter: block.how for parameter in held if (block := placed_block(parameter)) is not None}
        in_blocks = [p for group in optimizer.param_groups for p in group["params"] if p in blocks and blocks[p].axes]
        if in_blocks:
            axes = "+".join(blocks[in_blocks[0]].axes)
            raise InputError(
                f"{type(optimizer).__name__} cannot update blocks of parameters, which mesh axis {axes} cuts: its "
                "update of an element depends on the others. Use an elementwise optimizer such as AdamW for these "
                "parameters, or tensor-parallel degree 1."
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


class BarrierStep(OptimizerStep):
    """All ranks wait for each other before they update.

    Args:
        sum_over_processes: adds a float64 tensor on the CPU over all processes; by default over the pipeline's group.
        scaler: of the loss, for float16.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float = math.inf,
        sum_over_processes: Callable[[Tensor], Tensor] | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(pipeline, optimizer, max_norm=max_norm)
        self._scaler = scaler
        self._sum = sum_over_processes or pipeline.executor.connection.sum_over_processes

    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        if self._scaler is not None:
            self._pipeline.loss_scale = self._scaler.scale
        loss = self._pipeline.step(inputs, targets)
        norms = gradient_norms(self._pipeline)
        own = numbers() if numbers is not None else torch.empty(0)
        summed = self._sum(torch.cat([norms.flatten(), own.double()]))
        norm = clip_by_norms(self._pipeline, summed[: norms.numel()].view_as(norms), self._max_norm)
        applied = bool(loss.isfinite()) and bool(norm.isfinite())
        if applied:
            update_parameters(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        skipped = self._scaler is not None and not applied and bool(loss.isfinite())
        if self._scaler is not None and (applied or skipped):
            self._scaler.update(finite=applied)
        return [Update(loss, norm, applied, summed[norms.numel() :], skipped)]

    def settle(self) -> list[Update]:
        return []
