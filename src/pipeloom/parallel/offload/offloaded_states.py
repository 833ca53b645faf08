"""An optimizer's states while they are offloaded: where they lie, the portions in which they move, and their values."""

import copy
from collections import UserDict, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import Wait
from pipeloom.errors import InputError, one_line
from pipeloom.parallel.offload.main_parameters import OffloadedParameter, offloaded_parameter
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.store import Region, Store, aligned, queued_work

State = dict[str, Any]

_AWAY = object()  # in place of a tensor that is in the store
_ALIGNMENT_BYTES = 64
_NUM_PROBES = 2  # steps: some optimizers make states in the second


class StateEntry(NamedTuple):
    """One state of one parameter in a portion's region.

    Attributes:
        key: the optimizer's name of the state.
        shape, stride, dtype: of the tensor, which is dense.
        offset, num_bytes: its place in the region.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int

    def fits(self, value: Any) -> TypeGuard[Tensor]:
        """Whether a value has this entry's shape and dtype."""
        return isinstance(value, Tensor) and (tuple(value.shape), value.dtype) == (self.shape, self.dtype)

    def view(self, region: Tensor) -> Tensor:
        """The state as a view of the bytes of its region."""
        values = region[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return values.as_strided(self.shape, self.stride)


class PageRun(NamedTuple):
    """Adjacent pages of offloaded parameters, and their offset in a buffer."""

    store: Store
    region: Region
    offset: int

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
            store, (start, size), offset = self.page_runs[-1] if self.page_runs else (None, (0, 0), 0)
            if store is home.store and start + size == home.region.offset:
                self.page_runs[-1] = PageRun(home.store, Region(start, size + home.region.num_bytes), offset)
            else:
                self.page_runs.append(PageRun(home.store, home.region, self.buffer_bytes))
            self.buffer_bytes += home.region.num_bytes


def make_portions(optimizer: torch.optim.Optimizer, least_bytes: int, portion_bytes: int) -> list[Portion]:
    """Portions of neighbouring parameters on one device, each up to about `portion_bytes`.

    Offloaded parameters go in the order of the store, for few reads. States below `least_bytes` are left out.

    Raises:
        InputError: a step of the optimizer on zeros fails, or it keeps state in its groups.
    """
    stores: dict[Store, int] = {}

    def place(pair: tuple[int, nn.Parameter]) -> tuple[int, int]:
        home = offloaded_parameter(pair[1])
        return (-1, 0) if home is None else (stores.setdefault(home.store, len(stores)), home.region.offset)

    pairs = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
    known: dict[Any, tuple[list[StateEntry], int]] = {}
    portions: list[Portion] = []
    for number, parameter in sorted(pairs, key=place):
        kind = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        if kind not in known:
            known[kind] = _lay_out(_probed_state(optimizer, number, parameter), least_bytes)
        entries, size = known[kind]
        home, last = offloaded_parameter(parameter), portions[-1] if portions else None
        together = size + (home.region.num_bytes if home is not None else 0)
        device = parameter.device
        if last is None or last.buffer_bytes + together > portion_bytes or last.parameters[0][0].device != device:
            last = Portion()
            portions.append(last)
        last.parameters.append((parameter, number))
        last.entries[parameter] = tuple(entry._replace(offset=entry.offset + last.num_bytes) for entry in entries)
        last.num_bytes += size
        last.buffer_bytes += together
    for portion in portions:
        portion.close()
    return portions


def _probed_state(optimizer: torch.optim.Optimizer, number: int, parameter: nn.Parameter) -> Mapping[str, Any]:
    """The states of a parameter of the `number`-th group, after two steps of a copy of the optimizer on zeros."""
    if not parameter.numel() or not parameter.requires_grad:
        return {}
    name = type(optimizer).__name__
    twin = nn.Parameter(torch.zeros_like(parameter, memory_format=torch.preserve_format))
    twin.grad = torch.zeros_like(twin, memory_format=torch.preserve_format)
    options = {key: copy.deepcopy(value) for key, value in optimizer.param_groups[number].items() if key != "params"}
    probe = copy.copy(optimizer)  # without hooks
    vars(probe).update({key: value for key, value in vars(optimizer).items() if key not in vars(probe)})
    probe.state = defaultdict(dict)
    probe.param_groups = [{**options, "params": [twin]}]
    try:
        for _ in range(_NUM_PROBES):
            probe.step()
    except Exception as error:
        raise InputError(
            f"{name} cannot be stepped with one parameter of shape {list(parameter.shape)} and a gradient of zeros "
            f"({one_line(error)}): its states cannot be offloaded. Use another optimizer, or do not offload states."
        ) from error
    if any(repr(probe.param_groups[0].get(key)) != repr(value) for key, value in options.items()):
        raise InputError(
            f"{name} keeps state in its parameter groups, which does not work with offloaded states: they are "
            "updated in portions. Use another optimizer, or do not offload states."
        )
    found: Mapping[str, Any] = probe.state[twin]
    return found


def _lay_out(state: Mapping[str, Any], least_bytes: int) -> tuple[list[StateEntry], int]:
    """The places of dense tensors of at least `least_bytes`, and the bytes of all together."""
    entries, end = [], 0
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.nbytes < least_bytes or value.layout is not torch.strided:
            continue
        if torch.empty_like(value, device="meta").stride() == value.stride():  # it keeps the order of dimensions
            entries.append(StateEntry(key, tuple(value.shape), value.stride(), value.dtype, end, value.nbytes))
            end += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return entries, end


class OffloadedStates(UserDict[Tensor, State]):
    """An optimizer's ``state``: by parameter, the state dict that it made. Offloaded tensors are read on access."""

    def __init__(self, portions: Sequence[Portion], mover: Mover) -> None:
        super().__init__()
        self._mover = mover
        self._homes: dict[Tensor, Portion] = {p: portion for portion in portions for p, _ in portion.parameters}
        self._snapshots: dict[Portion, Tensor] = {}

    def __getitem__(self, parameter: Tensor) -> State:
        kept = self.data[parameter]
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
                dense = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype).copy_(value)
                place = portion.region.part(entry.offset, entry.num_bytes)
                self._mover.store.write(place, dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
                kept[entry.key] = _AWAY
        self.data[parameter] = kept

    def clear(self) -> None:
        self.data.clear()

    def fetch(self, portion: Portion, buffer: Tensor, ready: Wait, behind: Sequence[Future[None]]) -> None:
        """Fill a buffer with a portion, after some writes; the reading thread calls it."""
        for write in behind:
            write.result()
        ready()
        if any(value is _AWAY for p, _ in portion.parameters for value in self.data.get(p, {}).values()):
            self._mover.store.read(portion.region, buffer[: portion.num_bytes])
        for run in portion.page_runs:
            run.store.read(run.region, run.part_of(buffer))

    def assemble(self, parameter: Tensor, buffer: Tensor) -> State:
        """The state of a parameter, large tensors in a buffer that was filled."""
        return _filled(self.data.get(parameter, {}), self._homes[parameter].entries[parameter], buffer)

    def put(self, portion: Portion, states: Mapping[Tensor, State], buffer: Tensor) -> Future[None]:
        """Take the states after an update, and begin to write a portion's buffer."""
        self._snapshots.clear()
        for parameter, _ in portion.parameters:
            if parameter not in states:
                continue
            kept = self.data[parameter] = dict(states[parameter])
            for entry in portion.entries[parameter]:
                value = kept.get(entry.key)
                if entry.fits(value):  # another one stays where it is
                    place = entry.view(buffer)
                    if value.data_ptr() != place.data_ptr():
                        place.copy_(value)
                    kept[entry.key] = _AWAY
        portion.written = self._mover.write(self._write, portion, buffer, queued_work(buffer.device))
        for home, _ in portion.homes.values():
            home.written = portion.written
        return portion.written

    def _write(self, portion: Portion, buffer: Tensor, ready: Wait) -> None:
        ready()
        if portion.num_bytes:
            self._mover.store.write(portion.region, buffer[: portion.num_bytes])
        for run in portion.page_runs:
            run.store.write(run.region, run.part_of(buffer))


def _filled(kept: State, entries: Sequence[StateEntry], region: Tensor | None) -> State:
    if region is None:
        return dict(kept)
    places = {entry.key: entry for entry in entries}
    return {key: places[key].view(region) if value is _AWAY else value for key, value in kept.items()}
