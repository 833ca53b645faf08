"""`Portion`: parameters that one part of an offloaded update reads, updates and writes together."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.parallel.offload.main_parameters import OffloadedParameter, offloaded_parameter
from pipeloom.parallel.offload.state_layout import Layouts, StateEntry
from pipeloom.parallel.offload.store import Region, Store, aligned


class PageRun(NamedTuple):
    """Pages of offloaded parameters, and their offset in a buffer."""

    store: Store
    region: Region
    offset: int

    def joined(self, behind: PageRun) -> PageRun | None:
        """With the run behind it; None where they are not adjacent."""
        start, size = self.region
        if self.store is not behind.store or start + size != behind.region.offset:
            return None
        return self._replace(region=Region(start, size + behind.region.num_bytes))

    def part_of(self, buffer: Tensor) -> Tensor:
        """These pages of a buffer."""
        return buffer[self.offset : self.offset + self.region.num_bytes]


@dataclass(eq=False)
class Portion:
    """Parameters that are moved together: their states, and offloaded parameters themselves.

    Attributes:
        parameters: each with the number of its group.
        entries: for each parameter, where its states lie in the region.
        num_bytes: of the region.
        region: of the store, once it is reserved.
        homes: offloaded parameters, and the offset of their pages in a buffer, behind the states.
        page_runs: the same pages, adjacent ones joined.
        buffer_bytes: of states and offloaded parameters.
        written: the last write.
    """

    parameters: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    entries: dict[Tensor, tuple[StateEntry, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    region: Region = Region(0, 0)  # noqa: RUF009  # immutable
    homes: dict[nn.Parameter, tuple[OffloadedParameter, int]] = field(default_factory=dict)
    page_runs: list[PageRun] = field(default_factory=list)
    buffer_bytes: int = 0
    written: Future[None] | None = None

    def close(self) -> None:
        """All parameters are added: lay out states on whole pages, and offloaded parameters behind them."""
        self.num_bytes = self.buffer_bytes = aligned(self.num_bytes)
        for parameter, _ in self.parameters:
            home = offloaded_parameter(parameter)
            if home is None:
                continue
            self.homes[parameter] = home, self.buffer_bytes
            run = PageRun(home.store, home.region, self.buffer_bytes)
            before = self.page_runs[-1].joined(run) if self.page_runs else None
            self.page_runs[-1:] = [before] if before else [*self.page_runs[-1:], run]
            self.buffer_bytes += home.region.num_bytes


def make_portions(optimizer: torch.optim.Optimizer, layouts: Layouts, portion_bytes: int) -> list[Portion]:
    """Portions of neighbouring parameters on one device, each up to about `portion_bytes`."""
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
    """Parameters with the number of their group; offloaded ones in the order of the store, for few reads."""
    pairs = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
    stores: dict[Store, int] = {}

    def place(pair: tuple[int, nn.Parameter]) -> tuple[int, int]:
        home = offloaded_parameter(pair[1])
        return (-1, 0) if home is None else (stores.setdefault(home.store, len(stores)), home.region.offset)

    return sorted(pairs, key=place)
