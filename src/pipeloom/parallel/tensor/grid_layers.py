"""Layers of a model on a grid: linear layers, norms, the embedding of tokens, and the loss.

Parameters are the blocks of this process, under the names that they have in the model that is not cut.

Legend: B batch, S tokens of the sequence or slice, W width, V vocabulary; b = B / batch blocks, w = W / side.
"""

import torch
from torch import Tensor, nn

from pipeloom.parallel.axis_functions import reduce_from
from pipeloom.parallel.placed import Placed, place_parameter
from pipeloom.parallel.tensor.cross_entropy import IGNORED, check_ids, token_losses
from pipeloom.parallel.tensor.grid import Grid
from pipeloom.parallel.tensor.grid_norms import layer_norm, rms_norm
from pipeloom.parallel.tensor.grid_shape import Activations


class Shards:
    """This process's blocks of the parameters of a model. A parameter that layers share stays shared."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._blocks: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, full: nn.Parameter | None, how: Placed) -> nn.Parameter | None:
        """The block of a full parameter, placed; of None, None."""
        if full is None:
            return None
        if full not in self._blocks:
            with torch.no_grad():
                block = nn.Parameter(how.cut(full, self.grid.place), full.requires_grad)
            place_parameter(block, how, self.grid.place)
            self._blocks[full] = block
        return self._blocks[full]


class GridLinear(nn.Module):
    """``F.linear``: [b, S, inputs/side] -> [b, S, outputs/side].

    The bias is cut as the outputs are, and added by every process to its own samples.

    Args:
        weight, bias: blocks.
    """

    sliceable = True

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, grid: Grid, source: Activations, target: Activations
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.grid, self.source, self.target = grid, source, target

    def forward(self, x: Tensor) -> Tensor:
        y = self.grid.product(x, self.weight, self.source, self.target)
        return y if self.bias is None else y + self.bias


class GridNorm(nn.Module):
    """Layer norm or RMS norm of activations between blocks: [b, S, w] -> [b, S, w].

    Args:
        weight, bias: blocks, or None.
        eps: None (RMS norm only): the smallest of the dtype.
        centered: whether the mean is subtracted: layer norm.
    """

    sliceable = True

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, grid: Grid, eps: float | None, *, centered: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.grid, self.eps, self.centered = grid, eps, centered

    def forward(self, x: Tensor) -> Tensor:
        axis = self.grid.axis(self.grid.shape.outer.width)
        if self.centered:
            return layer_norm(x, self.weight, self.bias, axis, self.eps or 0.0)
        return rms_norm(x, self.weight, axis, self.eps)


class GridLookUp:
    """``F.embedding`` of a whole micro-batch: token ids [B, S] and the block of a table [V, W] -> [b, S, w].

    Args:
        vocabulary_size: V.
    """

    def __init__(self, grid: Grid, vocabulary_size: int) -> None:
        self.grid, self.vocabulary_size = grid, vocabulary_size

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        check_ids(tokens, self.vocabulary_size, "inputs")
        return self.grid.embed(tokens, weight)


class GridLoss:
    """Mean cross-entropy over all tokens of a micro-batch, in nats, of logits that lie on a grid.

    Called with this process's logits [b, S, V/side] and the targets [B, S] of the whole micro-batch, of any integer
    type; targets of -100 do not count. The loss is the same on all processes. Logits are not gathered.

    Args:
        vocabulary_size: V.
    """

    def __init__(self, grid: Grid, vocabulary_size: int) -> None:
        self.grid, self.vocabulary_size = grid, vocabulary_size

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        inner = self.grid.shape.inner
        own = self.grid.own_samples(targets, inner)
        losses = token_losses(logits, own, self.grid.axis(inner.width), self.vocabulary_size)
        return reduce_from(losses.sum(), self.grid.axis(*inner.batch)) / (targets != IGNORED).sum()
