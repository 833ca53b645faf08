"""Running statistics of BatchNorm over the whole batch, where a model runs on its micro-batches."""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from pipeloom.errors import InputError
from pipeloom.pipe.calls.stage_call import is_recomputing

Module = TypeVar("Module", bound=nn.Module)
_BatchNorm = nn.modules.batchnorm._BatchNorm


class DeferredBatchNorm(_BatchNorm):
    """A BatchNorm that normalizes each micro-batch and updates its running statistics once per batch.

    The running statistics are those of the whole batch: means and squared deviations of the micro-batches are combined
    (Chan, Golub and LeVeque 1979). Names in state_dict are those of nn.BatchNorm.

    Args:
        num_features, eps, momentum, affine: as those of nn.BatchNorm.
        chunks: the number of micro-batches per batch. A `Pipe` sets it for each batch.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True, **kwargs)
        self.begin(chunks)

    def begin(self, chunks: int) -> None:
        """Start a batch of `chunks` micro-batches; what an unfinished one has seen is dropped."""
        self.chunks = chunks
        self._seen = 0  # micro-batches
        self._count = 0  # values per channel
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None  # sums of squared deviations from the mean

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch [N, C, ...]."""
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if not is_recomputing():
            with torch.no_grad():
                self._track(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _track(self, input: Tensor) -> None:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input.to(self.running_mean.dtype)
        count = values.numel() // values.size(1)
        variance, mean = torch.var_mean(values, dims, correction=0)
        if self._mean is None or self._squares is None:
            self._mean, self._squares = mean, variance * count
        else:
            total = self._count + count
            difference = mean - self._mean
            self._mean = self._mean + difference * (count / total)
            self._squares = self._squares + variance * count + difference**2 * (self._count * count / total)
        self._count += count
        self._seen += 1
        if self._seen == self.chunks:
            self._commit(self._mean, self._squares)

    def _commit(self, mean: Tensor, squares: Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(squares / max(1, self._count - 1), momentum)
        self.begin(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """Replace the BatchNorms in `module` that have running statistics; parameters and buffers are shared.

        Returns:
            the module, or what replaces it; hooks are those of the module.

        Raises:
            InputError: a BatchNorm computes something else than those of torch.
        """
        converted: nn.Module = module
        known = isinstance(module, DeferredBatchNorm) and module.chunks == chunks
        if isinstance(module, _BatchNorm) and module.track_running_stats and not known:
            _check_plain(module)
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            for name in ("weight", "bias"):
                converted.register_parameter(name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                converted.register_buffer(name, getattr(module, name))
            converted.train(module.training)
            vars(converted).update({name: value for name, value in vars(module).items() if "hook" in name})
        for name, child in module._modules.items():
            if child is not None:
                converted._modules[name] = cls.convert_deferred_batch_norm(child, chunks)
        return cast("Module", converted)


def _check_plain(norm: nn.Module) -> None:
    """Raises InputError for a norm whose forward or parameters are not those of nn.BatchNorm."""
    kind = type(norm)
    if kind.forward not in (_BatchNorm.forward, DeferredBatchNorm.forward) or "forward" in vars(norm):
        raise InputError(
            f"deferred_batch_norm=True: {kind.__name__} has a forward of its own, which DeferredBatchNorm does not "
            "run. Use nn.BatchNorm1d, 2d or 3d, or deferred_batch_norm=False."
        )
    if parametrize.is_parametrized(norm):
        raise InputError(
            "deferred_batch_norm=True: a BatchNorm has parametrized tensors, which DeferredBatchNorm does not compute. "
            "Remove the parametrization, or use deferred_batch_norm=False."
        )
