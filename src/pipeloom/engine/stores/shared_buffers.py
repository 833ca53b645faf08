"""`SharedBuffers`: makes the buffers that several ranks hold equal after a step.

Forwards write into buffers such as the running statistics of a BatchNorm, on each replica of a stage from its own
micro-batches. As under DistributedDataParallel, one rank broadcasts its values to the others: after a step all of them
have the values of the rank that ran micro-batch 0. Only buffers that changed since the last step are sent.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import RunError


class BufferHome(NamedTuple):
    """Where a rank has a shared buffer.

    Attributes:
        module, attribute: the buffer is ``module.attribute``.
        source: the rank whose values the others take.
        ranks: all ranks with the buffer, ascending.
    """

    module: nn.Module
    attribute: str
    source: int
    ranks: tuple[int, ...]

    @property
    def value(self) -> Tensor | None:
        return self.module._buffers[self.attribute]


class SharedBuffers:
    """The buffers that one rank shares within one gradient group, by name."""

    def __init__(self, rank: int, homes: Mapping[str, BufferHome]) -> None:
        self._rank = rank
        self._homes = homes
        # Values are compared, because batch_norm does not increment the version counters of its statistics.
        self._equal = {name: _copy(home.value) for name, home in homes.items()}
        self._changed: frozenset[str] = frozenset()

    @property
    def ranks(self) -> set[int]:
        """All ranks that share one of these."""
        return {rank for home in self._homes.values() for rank in home.ranks}

    def look(self) -> None:
        """Find the buffers that changed since they were last made equal."""
        self._changed = frozenset(n for n, home in self._homes.items() if not _same(home.value, self._equal[n]))

    def to_send(self, peer: int) -> dict[str, Tensor | None]:
        """The values for `peer`."""
        mine = {name: self._homes[name] for name in sorted(self._changed)}
        return {n: home.value for n, home in mine.items() if home.source == self._rank and peer in home.ranks}

    def take(self, values: Mapping[str, Tensor | None]) -> None:
        """Give the buffers the values of their source ranks, which are then equal on all ranks.

        Raises:
            RunError: a buffer changed on this rank and not on its source.
        """
        for name in sorted(self._changed - values.keys()):
            source = self._homes[name].source
            if source != self._rank:
                raise RunError(
                    f"buffer {name} was changed by forwards on rank {self._rank} but not on rank {source}, whose "
                    "values the replicas take: a forward must change a buffer on all replicas or on none. Freeze the "
                    "buffer, or use a schedule without replicas."
                )
        for name, value in values.items():
            home, own = self._homes[name], self._homes[name].value
            if own is not None and value is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                own.copy_(value)
            else:
                home.module._buffers[home.attribute] = _copy(value)
        for name in self._changed | values.keys():
            self._equal[name] = _copy(self._homes[name].value)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
