"""`Portion`: some parameters whose update brings what it needs from a store, and takes it away again."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.parallel.offload.main_parameters import OffloadedParameter, offloaded_parameter
from pipeloom.parallel.offload.state_layout import Entry, Layouts
from pipeloom.parallel.offload.store import Region, Store, aligned


class Span(NamedTuple):
    """Pages of parameters, and where a buffer has them."""

    store: Store
    region: Region
    offset: int

    def joined(self, behind: Span) -> Span | None:
        """With the one behind it; None where something is between them."""
        start, size = self.region
        if self.store is not behind.store or start + size != behind.region.offset:
            return None
        return self._replace(region=Region(start, size + behind.region.num_bytes))

    def part_of(self, buffer: Tensor) -> Tensor:
        """Of a buffer, these pages."""
        return buffer[self.offset : self.offset + self.region.num_bytes]


@dataclass(eq=False)
class Portion:
    """Parameters that are moved together: their states, and where they are away themselves.

    Attributes:
        parameters: with the number of the group of each.
        entries: for each parameter, where its states lie in the region.
        num_bytes: of the region.
        region: of the store, once it is reserved.
        homes: parameters that are away, and where a buffer has their pages: behind the states.
        spans: the same, as few as can be.
        buffer_bytes: of states and such parameters.
        written: the write that was asked for last.
    """

    parameters: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    entries: dict[Tensor, tuple[Entry, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    region: Region = Region(0, 0)  # noqa: RUF009  # immutable
    homes: dict[nn.Parameter, tuple[OffloadedParameter, int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    buffer_bytes: int = 0
    written: Future[None] | None = None

    def close(self) -> None:
        """No parameter will be added: states take whole pages, and parameters that are away come behind them."""
        self.num_bytes = self.buffer_bytes = aligned(self.num_bytes)
        for parameter, _ in self.parameters:
            home = offloaded_parameter(parameter)
            if home is None:
                continue
            self.homes[parameter] = home, self.buffer_bytes
            span = Span(home.store, home.region, self.buffer_bytes)
            before = self.spans[-1].joined(span) if self.spans else None
            self.spans[-1:] = [before] if before else [*self.spans[-1:], span]
            self.buffer_bytes += home.region.num_bytes


def make_portions(optimizer: torch.optim.Optimizer, layouts: Layouts, portion_bytes: int) -> list[Portion]:
    """Neighbouring parameters of one device together, as many as a portion takes."""
    portions: list[Portion] = []
    size_of: dict[Portion, int] = {}
    for number, parameter in _in_order(optimizer):
        entries, size = layouts.of(parameter, number)
        home, last = offloaded_parameter(parameter), portions[-1] if portions else None
        together = size + (home.region.num_bytes if home is not None else 0)
        if last is None or size_of[last] + together > portion_bytes or last.parameters[0][0].device != parameter.device:
            last = Portion()
            portions.append(last)
            size_of[last] = 0
        last.parameters.append((parameter, number))
        last.entries[parameter] = tuple(entry.shifted(last.num_bytes) for entry in entries)
        last.num_bytes += size
        size_of[last] += together
    for portion in portions:
        portion.close()
    return portions


def _in_order(optimizer: torch.optim.Optimizer) -> list[tuple[int, nn.Parameter]]:
    """Parameters with the number of their group; those that are away as they lie in a store, to be read at once."""
    pairs = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
    stores: dict[Store, int] = {}

    def place(pair: tuple[int, nn.Parameter]) -> tuple[int, int]:
        home = offloaded_parameter(pair[1])
        return (-1, 0) if home is None else (stores.setdefault(home.store, len(stores)), home.region.offset)

    return sorted(pairs, key=place)
