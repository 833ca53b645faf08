"""Embeddings of which every process has a part of the vocabulary (arXiv:1909.08053, section 3).

process r has rows [r n, (r + 1) n) of the table, n = ceil(V / t); rows from V on are padding, which no result reads
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.placed import Cut, Placed, even
from pipeloom.parallel.tensor.one_d.tokens import scatter_sum


class Vocabulary:
    """The part of a vocabulary that this process has.

    Args:
        size: number of token ids.
        axis: of the processes that share it.

    Attributes:
        start: the first id of this process.
        valid: number of its ids, without padding.
        block: number of rows of its block.
    """

    def __init__(self, size: int, axis: Axis) -> None:
        self.size, self.axis = size, axis
        self.block = -(-size // axis.degree)
        self.start = min(axis.index * self.block, size)
        self.valid = min(self.start + self.block, size) - self.start

    def placed(self, shape: tuple[int, ...], dim: int, axes: tuple[str, ...]) -> Placed:
        """How a parameter of this full shape lies, whose dimension `dim` is the vocabulary."""
        cuts: dict[int, Cut] = {dim: even(self.size, self.axis.degree, axes)}
        return Placed(shape, cuts, padded={dim: self.block} if self.size % self.axis.degree else {})

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the own block for ids, 0 for those of other processes; and which are of other processes."""
        local = ids - self.start
        outside = (local < 0) | (local >= self.valid)
        return local.masked_fill(outside, 0), outside


def embed_own(tokens: Tensor, block: Tensor, own: Vocabulary, padding: int | None = None) -> Tensor:
    """Embeddings [.., W] of tokens whose ids this process has; 0 for others.

    Args:
        tokens: token ids [..].
        block: rows of the own ids, [block, W].
        padding: the id whose row gets no gradient, as in nn.Embedding.

    Raises:
        IndexError: an id is outside of the vocabulary (noticed on the CPU alone).
    """
    if tokens.device.type == "cpu" and tokens.numel():  # elsewhere it would wait for the device
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= own.size:
            raise IndexError(f"token ids from {low} to {high}: must be from 0 to {own.size - 1}.")
    rows, outside = own.local(tokens)
    padding = None if padding is None else padding - own.start
    inside = padding if padding is not None and 0 <= padding < own.valid else None
    return F.embedding(rows, block, padding_idx=inside).masked_fill(outside.unsqueeze(-1), 0.0)


class LookUp:
    """Looks up embeddings in blocks of a table: ``look_up(tokens [B, S], block) -> [B, S, W]``.

    Args:
        vocabulary: the part of this process.
        sequence: whether the result has a part of the tokens, [B, S / t, W].
        padding: the id whose row gets no gradient, as in nn.Embedding.
    """

    def __init__(self, vocabulary: Vocabulary, *, sequence: bool, padding: int | None = None) -> None:
        self.vocabulary, self.sequence, self.padding = vocabulary, sequence, padding

    def __call__(self, tokens: Tensor, block: Tensor) -> Tensor:
        x = embed_own(tokens, block, self.vocabulary, self.padding)
        return scatter_sum(x, self.vocabulary.axis, sequence=self.sequence)


class VocabularyEmbedding(nn.Module):
    """nn.Embedding in blocks. Token ids [B, S] -> [B, S, W], with sequence parallelism [B, S / t, W].

    Args:
        weight: the block of the table.
        look_up: finds rows, see `LookUp`.
    """

    sliceable = True

    def __init__(self, weight: nn.Parameter, look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = weight
        self.look_up = look_up

    def forward(self, tokens: Tensor) -> Tensor:
        return self.look_up(tokens, self.weight)


class OwnRows(nn.Module):
    """Base of the classes that embeddings with a forward of their own get: it runs on the rows of this process.

    Their forward treats every token by itself, such as a factor or a norm behind the look-up.
    """

    look_up: LookUp

    def forward(self, tokens: Tensor) -> Tensor:
        rows, outside = self.look_up.vocabulary.local(tokens)
        x: Tensor = super().forward(rows).masked_fill(outside.unsqueeze(-1), 0.0)
        return scatter_sum(x, self.look_up.vocabulary.axis, sequence=self.look_up.sequence)


def look_up_own_rows(module: nn.Embedding, block: nn.Parameter, look_up: LookUp) -> None:
    """Let an embedding with a forward of its own hold a block of its table."""
    own = look_up.vocabulary
    padding = None if module.padding_idx is None else module.padding_idx - own.start
    module.padding_idx = padding if padding is not None and 0 <= padding < own.valid else None
    module.weight = block
    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (OwnRows, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    module.look_up = look_up  # type: ignore[assignment]
