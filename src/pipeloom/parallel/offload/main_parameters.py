"""Main parameters, in memory or offloaded between gathers and updates (ZeRO-Infinity, arXiv:2104.07857).

The shards of a unit's parameters are adjacent in the store, each on separate pages:

    region    | a a a . | b . . . | c c c c c c . |
    gather    one read of the region; each shard is copied to its place, in the format of forwards
    update    reads the shards of one portion of the optimizer, with their states, and writes them back

An offloaded main parameter reads as NaN, in its own shape, and takes gradients as usual.
"""

import math
from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeloom.engine.overlap_times import Wait
from pipeloom.engine.stores.held_bytes import Gauge
from pipeloom.errors import InputError, RunError
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.store import PIECE_BYTES, Region, Store, aligned, copy_across, queued_work

_HOME = "_home_of_main_parameter"  # an attribute of parameters


class OffloadedParameter:
    """The pages of one main parameter in a store.

    Attributes:
        first: the position of its first element in this replica's segment.
        written: the last write.
        is_away: whether the values are in the store and not in the parameter.
    """

    def __init__(self, store: Store, region: Region, parameter: Tensor, first: int) -> None:
        self.store, self.region, self.first = store, region, first
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self.num_bytes = parameter.nbytes
        self.written: Future[None] | None = None
        self.is_away = False
        self._missing = parameter.new_full((), math.nan if parameter.is_floating_point() else 0).expand(self.shape)

    def bring(self, parameter: nn.Parameter, pages: Tensor) -> None:
        """Let the parameter be a view of memory with its pages."""
        parameter.data = self._values(pages)
        self.is_away = False

    def leave(self, parameter: nn.Parameter) -> None:
        """Release that memory."""
        parameter.data = self._missing
        self.is_away = True

    def write(self, values: Tensor) -> None:
        """Write all values of the parameter."""
        if self.written is not None:
            wait([self.written])  # also if it failed
            self.written = None
        flat = values.detach().to(self.dtype).reshape(-1).contiguous()
        queued_work(flat.device)()  # a store moves memory in a stream of its own
        self.store.write(self.region, flat.view(torch.uint8))

    def live(self) -> Tensor:
        """The parameter in the store, on the host. Writes to it go to the store."""
        if self.written is not None:
            self.written.result()  # raises RunError if it failed
        return self._values(self.store.view(self.region))

    def _values(self, pages: Tensor) -> Tensor:
        return pages[: self.num_bytes].view(self.dtype).view(self.shape)


def offloaded_parameter(parameter: Tensor) -> OffloadedParameter | None:
    """The pages of an offloaded main parameter; None for one in memory."""
    home: OffloadedParameter | None = vars(parameter).get(_HOME)
    return home


class OffloadedShard:
    """This replica's segment of a unit, in the format of updates, in a store.

    Args:
        own: its values. The main `parameters` are views of it, and take no memory from now on.
        dtype: of gathered memory; `gathered` counts bytes that are read before it is allocated.

    Raises:
        InputError: the store is full.
    """

    def __init__(
        self, own: Tensor, parameters: Iterable[nn.Parameter], mover: Mover, dtype: torch.dtype, gathered: Gauge
    ) -> None:
        _watch_steps()
        self._mover, self._gathered = mover, gathered
        self._empty, self._num_elements = own.new_empty(0, dtype=dtype), own.numel()
        parameters = list(parameters)
        for empty in filter(lambda parameter: not parameter.numel(), parameters):
            empty.data = own.new_empty(0)  # not a view of that memory
        held = [parameter for parameter in parameters if parameter.numel()]
        sizes = [aligned(parameter.nbytes) for parameter in held]
        try:
            self._region, end = mover.store.reserve(sum(sizes)) if sizes else Region(0, 0), 0
        except RunError as error:
            raise InputError(str(error)) from error
        self._homes: list[OffloadedParameter] = []
        for parameter, size in zip(held, sizes, strict=True):
            first = int(parameter.storage_offset() - own.storage_offset())
            home = OffloadedParameter(mover.store, self._region.part(end, size), parameter, first)
            setattr(parameter, _HOME, home)
            self._homes.append(home)
            home.write(parameter)
            home.leave(parameter)
            end += size
        self._begun: tuple[Tensor, Future[None]] | None = None
        self._aside = 0  # bytes read before the place was allocated

    def fill(self, place: Tensor) -> Wait:
        """Start to read it to its place in gathered memory, in the format of that memory; returns the `Wait`."""
        target, read = self._begun = self._begun or (place, self._start_read(place))

        def arrive() -> None:
            self._mover.wait(read)
            if target.data_ptr() != place.data_ptr():
                place.copy_(target)
            self.drop()

        return arrive

    def prefetch(self, place: Tensor | None) -> None:
        """Start the read that `fill` needs. None: the place is not allocated yet."""
        if self._begun is None:
            if place is None:
                place = self._empty.new_empty(self._num_elements)
                self._aside = place.nbytes
                self._gathered.add(self._aside)
            self._begun = place, self._start_read(place)

    def drop(self) -> None:
        """Discard what `prefetch` read."""
        if self._begun is not None and not self._aside:
            wait([self._begun[1]])  # its place may be freed next
        self._gathered.add(-self._aside)
        self._begun, self._aside = None, 0

    def copy_to(self, place: Tensor) -> None:
        """`fill`, and wait; works on a closed pipeline too."""
        self._read(place, self._writes(), queued_work(place.device))

    def _start_read(self, target: Tensor) -> Future[None]:
        """Begin to read it, after pending writes."""
        return self._mover.read(self._read, target, self._writes(), queued_work(target.device))

    def _writes(self) -> list[Future[None]]:
        return [home.written for home in self._homes if home.written is not None]

    def _read(self, target: Tensor, behind: list[Future[None]], ready: Wait) -> None:
        for write in behind:
            write.result()
        ready()
        room = self._mover.store.room(target.device)
        for start in range(0, self._region.num_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, self._region.num_bytes)
            self._mover.store.read(self._region.part(start, stop - start), room[: stop - start])
            for home in self._homes:  # to their places in the segment
                offset = home.region.offset - self._region.offset
                begin, end = max(offset, start), min(offset + home.num_bytes, stop)
                if begin < end:
                    values = room[begin - start : end - start].view(home.dtype)
                    first = home.first + (begin - offset) // home.dtype.itemsize
                    copy_across(target[first : first + values.numel()], values)


@cache
def _watch_steps() -> None:
    """From now on, optimizers of this process raise on an update of offloaded parameters."""

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            home = offloaded_parameter(parameter)
            if home is not None and home.is_away and parameter.grad is not None:
                raise InputError(
                    f"{type(optimizer).__name__}.step(): the parameters are offloaded and not in memory. "
                    "Wrap it in pipeloom.OffloadedOptimizer and call step() of the wrapper."
                )

    register_optimizer_step_pre_hook(refuse)
