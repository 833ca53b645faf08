"""`OffloadedStates`: an optimizer's ``state`` while its tensors are offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.portions import Portion
from pipeloom.parallel.offload.state_layout import StateEntry
from pipeloom.parallel.offload.store import Ready

State = dict[str, Any]

_AWAY = object()  # in place of a tensor that is in the store


class OffloadedStates(MutableMapping[Tensor, State]):
    """By parameter, the state dict that the optimizer made. Offloaded tensors are read on access.

    Args:
        portions: of all parameters.
        mover: to and from their regions.
    """

    def __init__(self, portions: Sequence[Portion], mover: Mover) -> None:
        self._mover = mover
        self._homes: dict[Tensor, Portion] = {
            parameter: portion for portion in portions for parameter, _ in portion.parameters
        }
        self._kept: dict[Tensor, State] = {}
        self._snapshots: dict[Portion, Tensor] = {}

    def __getitem__(self, parameter: Tensor) -> State:
        kept = self._kept[parameter]
        portion = self._homes[parameter]
        if portion not in self._snapshots:
            if portion.written is not None:
                self._mover.wait(portion.written)
            if portion.num_bytes:
                self._snapshots[portion] = self._mover.store.snapshot(portion.region)
        return _filled(kept, portion.entries[parameter], self._snapshots.get(portion))

    def __setitem__(self, parameter: Tensor, state: State) -> None:
        portion = self._homes[parameter]
        if portion.written is not None:
            self._mover.wait(portion.written)
        self._snapshots.pop(portion, None)
        kept = dict(state)
        for entry in portion.entries[parameter]:
            value = state.get(entry.key)
            if entry.fits(value):
                assert isinstance(value, Tensor)
                dense = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype).copy_(value)
                place = portion.region.part(entry.offset, entry.num_bytes)
                self._mover.store.write(place, dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
                kept[entry.key] = _AWAY
        self._kept[parameter] = kept

    def __delitem__(self, parameter: Tensor) -> None:
        del self._kept[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def fetch(self, portion: Portion, buffer: Tensor, ready: Ready, behind: Sequence[Future[None]]) -> None:
        """Fill a buffer with a portion, after some writes; the reading thread calls it."""
        for write in behind:
            write.result()
        ready.wait()
        if any(value is _AWAY for p, _ in portion.parameters for value in self._kept.get(p, {}).values()):
            self._mover.store.read(portion.region, buffer[: portion.num_bytes])
        for run in portion.page_runs:
            run.store.read(run.region, run.part_of(buffer))

    def assemble(self, parameter: Tensor, buffer: Tensor) -> State:
        """The state of a parameter, large tensors in a buffer that was filled."""
        return _filled(self._kept.get(parameter, {}), self._homes[parameter].entries[parameter], buffer)

    def put(self, portion: Portion, states: Mapping[Tensor, State], buffer: Tensor) -> Future[None]:
        """Take the states after an update, and begin to write a portion's buffer."""
        self._snapshots.clear()
        for parameter, _ in portion.parameters:
            if parameter not in states:
                continue
            kept = dict(states[parameter])
            for entry in portion.entries[parameter]:
                value = kept.get(entry.key)
                if not entry.fits(value):  # stays where it is
                    continue
                assert isinstance(value, Tensor)
                place = entry.view(buffer)
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
                kept[entry.key] = _AWAY
            self._kept[parameter] = kept
        ready = Ready(buffer.device)
        portion.written = self._mover.write(partial(self._write, portion, buffer, ready))
        for home, _ in portion.homes.values():
            home.written = portion.written
        return portion.written

    def _write(self, portion: Portion, buffer: Tensor, ready: Ready) -> None:
        ready.wait()
        if portion.num_bytes:
            self._mover.store.write(portion.region, buffer[: portion.num_bytes])
        for run in portion.page_runs:
            run.store.write(run.region, run.part_of(buffer))


def _filled(kept: State, entries: Sequence[StateEntry], region: Tensor | None) -> State:
    places = {entry.key: entry for entry in entries}
    return {
        key: places[key].view(region) if value is _AWAY and region is not None else value for key, value in kept.items()
    }
