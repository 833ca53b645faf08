"""Buffers that several ranks hold: after a step all copies are that of the rank which ran micro-batch 0.

What a forward writes into a buffer, such as the running statistics of a BatchNorm, each copy of a stage writes from the
micro-batches that it sees itself. One copy has to count; as under DistributedDataParallel its values go to the others.
They travel with the gradients, and only where they changed since the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import RunError


class BufferHome(NamedTuple):
    """Where a rank has its copy of a shared buffer.

    Attributes:
        module, attribute: the buffer is ``module.attribute``.
        source: the rank whose copy counts.
        ranks: all that hold a copy, ascending.
    """

    module: nn.Module
    attribute: str
    source: int
    ranks: tuple[int, ...]

    @property
    def value(self) -> Tensor | None:
        return self.module._buffers[self.attribute]

    def take_over(self, value: Tensor | None) -> None:
        """Make the copy equal to `value`."""
        own = self.value
        if own is not None and value is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
            own.copy_(value)
        else:
            self.module._buffers[self.attribute] = _copy(value)


class SharedBuffers:
    """One rank's copies of the buffers that it shares within one gradient group.

    Args:
        rank: this rank.
        homes: by the buffer's name.
    """

    def __init__(self, rank: int, homes: Mapping[str, BufferHome]) -> None:
        self._rank = rank
        self._homes = homes
        # Values, not the tensors' version counters: what batch_norm writes does not count as a write there.
        self._equal = {name: _copy(home.value) for name, home in homes.items()}
        self._changed: frozenset[str] = frozenset()

    @property
    def ranks(self) -> set[int]:
        """All ranks that share one of these."""
        return {rank for home in self._homes.values() for rank in home.ranks}

    def look(self) -> None:
        """See which buffers changed since the copies were last made equal."""
        self._changed = frozenset(n for n, home in self._homes.items() if not _same(home.value, self._equal[n]))

    def to_send(self, peer: int) -> dict[str, Tensor | None]:
        """What `peer` is to take over."""
        mine = {name: self._homes[name] for name in sorted(self._changed)}
        return {n: home.value for n, home in mine.items() if home.source == self._rank and peer in home.ranks}

    def take(self, values: Mapping[str, Tensor | None]) -> None:
        """Take over what was sent here; afterwards all copies are equal.

        Raises:
            RunError: this copy of a buffer changed, and the one that counts did not.
        """
        for name in sorted(self._changed - values.keys()):
            source = self._homes[name].source
            if source != self._rank:
                raise RunError(
                    f"buffer {name} was changed by forwards on rank {self._rank} and not by those on rank {source}, "
                    "whose copy counts: all forwards change a buffer or none does; freeze it, or take a schedule that "
                    "holds each stage once"
                )
        for name, value in values.items():
            self._homes[name].take_over(value)
        for name in self._changed | values.keys():
            self._equal[name] = _copy(self._homes[name].value)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
