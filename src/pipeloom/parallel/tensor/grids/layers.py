"""Layers of a model on a grid: linear layers, norms, and the embedding of tokens.

Parameters are the blocks of this process, under the names that they have in the model that is not cut.

Legend: B batch, S tokens of the sequence or slice, W width, V vocabulary; b = B / batch blocks, w = W / side.
"""

from torch import Tensor, nn

from pipeloom.parallel.tensor.grids.grid import Grid
from pipeloom.parallel.tensor.grids.norms import layer_norm, rms_norm
from pipeloom.parallel.tensor.grids.shape import Activations
from pipeloom.parallel.tensor.one_d.logits import VocabularyLogits
from pipeloom.parallel.tensor.one_d.vocabulary import Vocabulary, embed_own


class GridLinear(nn.Module):
    """``F.linear``: [b, S, inputs/side] -> [b, S, outputs/side].

    The bias is cut as the outputs are, and added by every process to its own samples.

    Args:
        weight, bias: blocks.
        vocabulary: of a last layer, whose output is `VocabularyLogits` of this process's samples and ids.
    """

    sliceable = True
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        grid: Grid,
        source: Activations,
        target: Activations,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.grid, self.source, self.target, self.vocabulary = grid, source, target, vocabulary

    def forward(self, x: Tensor) -> Tensor:
        y = self.grid.product(x, self.weight, self.source, self.target)
        if self.bias is not None:
            y = y + self.bias
        if self.vocabulary is None:
            return y
        return VocabularyLogits.of(y, self.vocabulary, self.grid.axis(*self.target.batch))


class GridNorm(nn.Module):
    """Layer norm or RMS norm of activations between blocks: [b, S, w] -> [b, S, w].

    Args:
        weight, bias: blocks, or None.
        eps: None (RMS norm only): the smallest of the dtype.
        centered: whether the mean is subtracted: layer norm.
    """

    sliceable = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, grid: Grid, eps: float | None, *, centered: bool
    ) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.grid, self.eps, self.centered = grid, eps, centered

    def forward(self, x: Tensor) -> Tensor:
        axis = self.grid.axis(self.grid.shape.outer.width)
        if self.centered:
            return layer_norm(x, self.weight, self.bias, axis, self.eps or 0.0)
        return rms_norm(x, self.weight, axis, self.eps)


class GridLookUp:
    """``F.embedding`` of a whole micro-batch: token ids [B, S] and the block of a table [V, W] -> [b, S, w]."""

    def __init__(self, grid: Grid, vocabulary: Vocabulary) -> None:
        self.grid, self.vocabulary = grid, vocabulary

    def __call__(self, tokens: Tensor, block: Tensor) -> Tensor:
        return self.grid.embed(tokens, lambda ids: embed_own(ids, block, self.vocabulary))
