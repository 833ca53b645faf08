"""`OffloadedOptimizer`: an optimizer whose states, and possibly parameters, are in host memory or on disk.

An update processes the parameters in portions. While one portion is updated, the next is read and the one before is
written (ZeRO-Infinity, arXiv:2104.07857, section 5.2: three buffers):

    buffer 0   read 0 | update 0 | write 0 |  read 3  | ...
    buffer 1          |  read 1  | update 1 | write 1 |
    buffer 2                     |  read 2  | update 2 | ...

Every update is the optimizer's own step on some of its parameters, so the results are those of the optimizer alone.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, RunError
from pipeloom.parallel.mixed_precision import update_parameters
from pipeloom.parallel.offload.main_parameters import offloaded_parameter
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.offloaded_states import OffloadedStates, Portion, State, make_portions
from pipeloom.parallel.offload.store import HostStore, Store, open_store, page_buffer, queued_work
from pipeloom.parallel.options import OffloadTarget
from pipeloom.processes.host_memory import give_back_now

_NUM_BUFFERS = 3


class OffloadedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: same groups, options, steps and state dict, with offloaded states.

    The wrapped optimizer keeps its type and shows its states as tensors wherever they are (``optimizer.state``,
    ``state_dict()``), read on access. Call ``step()`` of the wrapper only. Parameters that the pipeline offloads
    (`pipeloom.DataParallel.offload`) are read and written together with their states.

    Args:
        optimizer: any torch optimizer that keeps its state per parameter.
        where: the offload target: "cpu" (host memory, for parameters on a GPU), "disk:PATH" (a file in a directory), or
            a `Store`. None: only parameters are offloaded.
        portion_bytes: about how many bytes are moved together; buffers take three times as much.
        least_bytes: smaller states stay in memory.

    Raises:
        InputError: the states are on the host already, the directory is not writable or too full for all states, or
            the optimizer keeps state in its groups or cannot be stepped in portions.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        where: str | Store | None,
        *,
        portion_bytes: int = 32 << 20,
        least_bytes: int = 4096,
    ) -> None:
        # The base constructor is not called: groups, state and hooks are those of the wrapped optimizer.
        if portion_bytes < 1 or least_bytes < 1:
            raise InputError(f"portion_bytes={portion_bytes}, least_bytes={least_bytes}: must be at least 1.")
        if isinstance(where, str):
            target = OffloadTarget.parse(where)
            if all(p.device.type == "cpu" for g in optimizer.param_groups for p in g["params"]):
                target.check_device("cpu", "where='cpu'", "optimizer states")
            where = open_store(target)
        if where is None:
            held = [offloaded_parameter(p) for g in optimizer.param_groups for p in g["params"] if p.numel()]
            if held and not any(held):  # a replica whose shards are all empty has nothing to offload
                raise InputError(
                    "where=None: there is nothing to offload, because the parameters are in memory. Name an offload "
                    "target for the states, such as `disk:PATH`, or pass data=pipeloom.DataParallel(..., offload=...)."
                )
            where, least_bytes = HostStore(), sys.maxsize  # holds nothing
        self.wrapped = optimizer
        self._mover = Mover(where)
        try:
            self._portions = make_portions(optimizer, least_bytes, portion_bytes)
            for portion in filter(lambda portion: portion.num_bytes, self._portions):
                portion.region = where.reserve(portion.num_bytes)
        except BaseException as error:
            self._mover.close()
            if isinstance(error, RunError):
                raise InputError(str(error)) from error
            raise
        self._largest = max((portion.buffer_bytes for portion in self._portions), default=0)
        self._buffers: list[Tensor] = []
        self._writes: dict[int, Future[None]] = {}  # by buffer, the last that was asked for
        self._states = OffloadedStates(self._portions, self._mover)
        self._adopt()
        optimizer.register_step_pre_hook(_refuse_direct_steps)

    widens_gradients = True  # see `pipeloom.update_parameters`

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        self._adopt()
        return self.wrapped.state

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not there yet
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({self.wrapped!r})"

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of offloaded states."""
        return sum(entry.num_bytes for p in self._portions for entries in p.entries.values() for entry in entries)

    @property
    def moved_bytes(self) -> int:
        """Bytes of states read and written so far; see `Pipeline.offloaded` for parameters."""
        return self._mover.store.read_bytes + self._mover.store.written_bytes

    @property
    def wait_seconds(self) -> float:
        """How long updates have waited for reads and writes so far."""
        return self._mover.wait_seconds

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        if self._mover.closed:
            raise InputError("OffloadedOptimizer.step() after close(): the states are deleted. Call close() last.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adopt()
        due = [portion for portion in self._portions if any(p.grad is not None for p, _ in portion.parameters)]
        reads: list[Future[None]] = [self._read(portion, number) for number, portion in enumerate(due[:1])]
        for number, portion in enumerate(due):
            if number + 1 < len(due):
                reads.append(self._read(due[number + 1], number + 1))
            self._mover.wait(reads[number])
            self._update(portion, self._buffer(number))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`zero_grad` of the wrapped optimizer."""
        self.wrapped.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, read on access: use or copy it before the next step."""
        self._adopt()
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the wrapped optimizer, and offload its states."""
        self.wrapped.load_state_dict(state_dict)
        self._adopt()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InputError: the store is reserved when the optimizer is wrapped."""
        raise InputError("OffloadedOptimizer.add_param_group() is unsupported. Add the group before wrapping.")

    def close(self) -> None:
        """Delete the offloaded states. Closing twice does nothing."""
        for portion in self._portions:
            if portion.homes and portion.written is not None:
                portion.written.exception()  # a gather of the parameter reports errors
        self._mover.close()

    def _adopt(self) -> None:
        """Offload the states that the wrapped optimizer holds itself, such as loaded ones."""
        held = self.wrapped.state
        if held is self._states:
            return
        self._states.clear()
        self._states.update(held)
        wrapped: Any = self.wrapped  # whose state need not be a dict
        wrapped.state = self._states

    def _buffer(self, number: int) -> Tensor:
        """The buffer of the `number`-th portion of an update."""
        count = min(_NUM_BUFFERS, len(self._portions))
        while len(self._buffers) < count:
            self._buffers.append(page_buffer(self._largest, self._portions[0].parameters[0][0].device))
        return self._buffers[number % count]

    def _read(self, portion: Portion, number: int) -> Future[None]:
        """Begin to fill the buffer of the `number`-th portion, after pending writes of both."""
        buffer, ready = self._buffer(number), queued_work(portion.parameters[0][0].device)
        behind = [write for write in (portion.written, self._writes.get(id(buffer))) if write is not None]
        return self._mover.read(self._states.fetch, portion, buffer, ready, behind)

    def _update(self, portion: Portion, buffer: Tensor) -> None:
        states = {parameter: self._states.assemble(parameter, buffer) for parameter, _ in portion.parameters}
        before: dict[Tensor, State] = {parameter: state for parameter, state in states.items() if state}
        with _only(self.wrapped, portion, buffer, before) as after:
            update_parameters(self.wrapped)
        self._writes[id(buffer)] = self._states.put(portion, after, buffer)
        if len(after) > len(before):  # states were just made, between tensors that stay: the heap has holes
            after.clear()
            give_back_now()


def _refuse_direct_steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if isinstance(optimizer.state, OffloadedStates):
        raise InputError(
            f"{type(optimizer).__name__}.step(): the states are offloaded, and it would change copies of them. Call "
            "step() of the OffloadedOptimizer."
        )


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, portion: Portion, buffer: Tensor, state: dict[Tensor, State]
) -> Iterator[dict[Tensor, State]]:
    """The optimizer with a portion's parameters and their states; yields the states, which change.

    Within it, offloaded parameters are views of the portion's buffer.
    """
    groups, whole = optimizer.param_groups, optimizer.state
    lists = [group["params"] for group in groups]
    some: dict[int, list[nn.Parameter]] = {}
    for parameter, number in portion.parameters:
        some.setdefault(number, []).append(parameter)
    local: defaultdict[Tensor, State] = defaultdict(dict, state)
    try:
        for parameter, (home, offset) in portion.homes.items():
            home.bring(parameter, buffer[offset:])
        for number, members in some.items():
            groups[number]["params"] = members
        optimizer.param_groups = [groups[number] for number in some]
        optimizer.state = local
        yield local
    finally:
        for group, members in zip(groups, lists, strict=True):
            group["params"] = members
        optimizer.param_groups, optimizer.state = groups, whole
        for parameter, (home, _) in portion.homes.items():
            home.leave(parameter)
