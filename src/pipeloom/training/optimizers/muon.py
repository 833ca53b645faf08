"""`Muon`: torch's Muon, also for matrices that the processes inside a stage hold in blocks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.blocks import Blocks
from pipeloom.parallel.placed import placed_block
from pipeloom.training.pipeline import Pipeline

_OF_TORCH = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")  # options of a group that an update passes on


class Muon(torch.optim.Muon):
    """Muon for matrices between hidden layers, as ``torch.optim.Muon``, in every layout inside a stage.

    Muon (https://kellerjordan.github.io/posts/muon) makes the momentum of a full matrix nearly orthogonal. Momentum is
    kept in blocks, as parameters are. Each step gathers it, along the axes that cut the matrix, one matrix after
    another; each of these processes orthogonalizes the full matrix and applies its own block of the result. Updates are
    those of ``torch.optim.Muon`` on the full matrix. A parameter with three dimensions is a stack of matrices, such as
    the weights of experts, each of which is updated by itself. Processes with other experts exchange nothing.

    Args:
        params: matrices and stacks of matrices, or groups of them, of a pipeline. With shards of data-parallel
            replicas, its ``data`` is ``pipeloom.DataParallel(..., layout="parameters")``.
        pipeline: whose parameters they are; or its ``state.sharing.blocks``.
        options: see ``torch.optim.Muon``.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        pipeline: Pipeline | Blocks,
        **options: Any,
    ) -> None:
        given: list[Any] = list(params)
        in_groups = not given or isinstance(given[0], dict)
        groups: list[dict[str, Any]] = given if in_groups else [{"params": given}]
        every = [[held] if isinstance(held := group["params"], Tensor) else list(held) for group in groups]
        # torch's Muon refuses stacks
        matrices = [[p for p in held if not _is_stack(p)] for held in every]
        super().__init__([{**group, "params": held} for group, held in zip(groups, matrices, strict=True)], **options)
        for group, held in zip(self.param_groups, every, strict=True):
            if any(map(_is_stack, held)):
                group["params"] = held
        self._blocks = pipeline.state.sharing.blocks if isinstance(pipeline, Pipeline) else pipeline

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Where matrices are cut, every process inside the stage calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [group["params"] for group in self.param_groups]
        try:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = [p for p in params if _is_plain(p)]
            super().step()  # type: ignore[no-untyped-call]
        finally:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = params
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not _is_plain(parameter):
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a stack of matrices, or a parameter in blocks."""
        momentum, state, block = group["momentum"], self.state[parameter], placed_block(parameter)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        is_stack = _is_stack(parameter)
        full = self._blocks.join(parameter, update, as_stack=is_stack)
        change = torch.zeros_like(full, dtype=parameter.dtype)
        # torch's own update of zeros by this gradient, without momentum: what is added to the full matrix.
        matrices = []
        for zeros, matrix in zip(change, full, strict=True) if is_stack else [(change, full)]:
            matrices.append(nn.Parameter(zeros))
            matrices[-1].grad = matrix.to(parameter.dtype)
        options = {name: group[name] for name in _OF_TORCH}
        muon = torch.optim.Muon(matrices, lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **options)
        muon.step()  # type: ignore[no-untyped-call]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if block is not None:
            change = (block.as_stack if is_stack else block).cut(change)
        parameter.add_(change)


def _is_stack(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and parameter.dim() == 3


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix that this process has in full."""
    block = placed_block(parameter)
    return not _is_stack(parameter) and (block is None or not block.how.axes)
