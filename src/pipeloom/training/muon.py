"""`Muon`: torch's Muon, also for matrices that the processes inside a stage hold in blocks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.blocks import Blocks
from pipeloom.parallel.placed import PlacedBlock, placed_block
from pipeloom.training.pipeline import Pipeline

_OF_TORCH = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")  # options of a group that an update passes on


class Muon(torch.optim.Muon):
    """Muon for matrices between hidden layers, as ``torch.optim.Muon``, in every layout inside a stage.

    Muon (https://kellerjordan.github.io/posts/muon) makes the momentum of a full matrix nearly orthogonal. Momentum is
    kept in blocks, as parameters are. Each step gathers it, along the axes that cut the matrix, one matrix after
    another; each of these processes orthogonalizes the full matrix and applies its own block of the result. Updates are
    those of ``torch.optim.Muon`` on the full matrix.

    Args:
        params: matrices, or groups of them, of a pipeline. With shards of data-parallel replicas, its ``data`` is
            ``pipeloom.DataParallel(..., layout="parameters")``.
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
        super().__init__(params, **options)
        self._blocks = pipeline.state.sharing.blocks if isinstance(pipeline, Pipeline) else pipeline

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Where matrices are cut, every process inside the stage calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [group["params"] for group in self.param_groups]
        cut = [[(p, block) for p in params if (block := _block_of(p)) is not None] for params in held]
        try:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = [p for p in params if _block_of(p) is None]
            super().step()  # type: ignore[no-untyped-call]
        finally:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = params
        for group, blocks in zip(self.param_groups, cut, strict=True):
            for parameter, block in blocks:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, block, group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: Tensor, block: PlacedBlock, group: dict[str, Any]) -> None:
        momentum, state = group["momentum"], self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        full = self._blocks.join(parameter, update)
        # torch's own update of zeros by this gradient, without momentum: what is added to the full matrix.
        change = nn.Parameter(torch.zeros_like(full, dtype=parameter.dtype))
        change.grad = full.to(parameter.dtype)
        options = {name: group[name] for name in _OF_TORCH}
        muon = torch.optim.Muon([change], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **options)
        muon.step()  # type: ignore[no-untyped-call]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(block.cut(change.detach()))


def _block_of(parameter: nn.Parameter) -> PlacedBlock | None:
    block = placed_block(parameter)
    return block if block is not None and block.how.axes else None
