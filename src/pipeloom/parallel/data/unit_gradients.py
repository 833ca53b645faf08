"""The gradients of units, from autograd to the optimizer, and when each unit's are summed over replicas.

module gradients      ``.grad`` of module parameters, as autograd makes them, until a reduction takes them
flat gradients        full: the flat tensor that a collective sums over replicas
sums over replicas    this replica's segment, kept until the run ends
main gradients        ``.grad`` of main parameters: the sums, added to the gradients of earlier runs
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import Wait
from pipeloom.errors import RunError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op, Program
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit_layout import FlatLayout, own_segment


@dataclass(eq=False)
class UnitGradients:
    """The gradients, of format `dtype`, of one unit, summed over micro-batches and replicas (see `Unit`).

    The main parameters have the order of the module's `parameters`.

    Attributes:
        present: for each parameter, whether this replica has a gradient in this run.
    """

    parameters: Sequence[nn.Parameter]
    _main: Mapping[str, nn.Parameter]
    _layout: FlatLayout
    _dtype: torch.dtype
    _strategy: DataStrategy
    _replicas: ReplicaGroup

    def __post_init__(self) -> None:
        offsets, sizes = self._layout.offsets, self._layout.sizes
        self._order = sorted(range(len(sizes)), key=lambda index: (offsets[index], sizes[index]))
        self._own_sum: Tensor | None = None  # of this replica's segment
        self._sums: list[Tensor | None] = [None] * len(self.parameters)  # instead, where there is one replica
        self._reducing: deque[tuple[Wait, Tensor, Tensor]] = deque()  # with this replica's segment, and all segments
        self._aside: list[Tensor | None] = []
        self.present = [False] * len(self.parameters)
        self._trained = [parameter.requires_grad for parameter in self.parameters]

    def begin(self) -> None:
        """Set aside the gradients of earlier runs."""
        pairs = list(zip(self.parameters, self._main.values(), strict=True))
        self._aside = [parameter.grad if parameter is main else None for parameter, main in pairs]
        for index, (parameter, main) in enumerate(pairs):
            parameter.grad = None
            if parameter.requires_grad is not main.requires_grad:  # the user froze or unfroze one of the two
                changed = main if main.requires_grad is not self._trained[index] else parameter
                parameter.requires_grad_(changed.requires_grad)
                main.requires_grad_(changed.requires_grad)
            self._trained[index] = main.requires_grad
        self.present = [False] * len(self.parameters)

    @property
    def late(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def start(self, look: Callable[[Tensor], None]) -> None:
        """Take the module's gradients and start their reduction, without waiting. One replica: once per run.

        `look` is called at peak memory, with flat gradients that `tensors` does not yield yet.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for index, (name, gradient) in enumerate(zip(self._main, gradients, strict=True)):
            if gradient is not None:
                if gradient.is_sparse:
                    raise RunError(
                        f"parameter {name!r} has a sparse gradient, which data parallelism does not support. Build "
                        "its layer with sparse=False."
                    )
                self.present[index] = True
        flat = None
        if self._replicas.degree == 1:
            self._sums = gradients
        else:
            flat = self._flattened(gradients)
            look(flat)
        for parameter in self.parameters:
            parameter.grad = None
        del gradient, gradients  # before the sum is allocated
        if flat is not None:
            self._reducing.append((*self._replicas.reduce_full(self._strategy, flat), flat))

    @torch.no_grad()
    def _flattened(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradients in flat memory, with zeros for missing ones and in the gaps."""
        flat = self.parameters[0].new_empty(self._layout.num_elements, dtype=self._dtype)
        row, end = [], 0
        for index in self._order:
            gradient, gap = gradients[index], self._layout.offsets[index] - end
            row += [flat.new_zeros(gap)] if gap else []
            row.append(flat.new_zeros(self._layout.sizes[index]) if gradient is None else gradient.reshape(-1))
            end = self._layout.offsets[index] + self._layout.sizes[index]
        return torch.cat([*row, flat.new_zeros(flat.numel() - end)], out=flat)

    def wait_first(self) -> None:
        """Wait for the oldest reduction."""
        wait, own, _ = self._reducing.popleft()
        wait()
        self._own_sum = own if self._own_sum is None else self._own_sum.add_(own)

    def deposit(self, present: Sequence[bool], loss_scale: float) -> None:
        """Add the run's sums, divided by `loss_scale`, to the main gradients of the parameters that are `present`."""
        segment = own_segment(self._strategy, self._replicas.index)
        sums = self._sums if self._own_sum is None else self._layout.shards(self._own_sum, segment)
        for index, main in enumerate(self._main.values()):
            total = sums[index] if present[index] and main.numel() else None
            before = self._aside[index] if main is self.parameters[index] else main.grad
            if total is not None:
                total = total.view(main.shape) if loss_scale == 1.0 else total.view(main.shape).div_(loss_scale)
                total = total if before is None else before.add_(total)
            main.grad = before if total is None else total
        self.drop()

    def drop(self) -> None:
        """Drop all state of the run."""
        self._own_sum, self._aside = None, []
        self._sums = [None] * len(self.parameters)
        self._reducing.clear()

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that hold gradients now."""
        grads = (parameter.grad for parameter in (*self.parameters, *self._main.values()))
        yield from (tensor for tensor in (*grads, self._own_sum, *self._sums, *self._aside) if tensor is not None)
        for _, own, flat in self._reducing:
            yield from (own, flat)


class Completion:
    """Starts the reductions of one REDUCE_GRAD inside the last backward that it covers.

    All replicas reduce the `units` in their order.
    """

    def __init__(self, units: Sequence[UnitGradients], start: Callable[[UnitGradients], None]) -> None:
        self._units, self._start = units, start
        self._queue: deque[UnitGradients] = deque()
        self._missing: dict[UnitGradients, set[int]] = {}
        self._begun = False

    def begin(self) -> None:
        """The last backward begins."""
        self._queue.extend(unit for unit in self._units if any(p.requires_grad for p in unit.parameters))
        self._begun = True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Around the last backward: a unit starts once all its parameters have their gradients."""
        self.begin()
        handles = []
        for unit in self._queue:
            wanted = [(i, parameter) for i, parameter in enumerate(unit.parameters) if parameter.requires_grad]
            self._missing[unit] = {index for index, _ in wanted}
            for index, parameter in wanted:
                hook = partial(self._arrived, unit, index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrived(self, unit: UnitGradients, index: int, _: Tensor) -> None:
        if unit in self._missing:
            self._missing[unit].discard(index)
            while self._queue and not self._missing[self._queue[0]]:
                self._start(self._queue.popleft())

    def reach(self, unit: UnitGradients) -> None:
        """All gradients of `unit` are computed. Called in the order of the units, also for those not reduced here."""
        if self._queue and self._queue[0] is unit:
            self._start(self._queue.popleft())

    def flush(self) -> None:
        """Start all that remain, also units with missing gradients."""
        if not self._begun:
            self.begin()
        while self._queue:
            self._start(self._queue.popleft())
        self.drop()

    def drop(self) -> None:
        """Drop all state of the run."""
        self._queue.clear()
        self._missing.clear()
        self._begun = False


@dataclass(eq=False)
class Reductions:
    """The reductions of one rank over replicas, from the first that starts to the deposit of all sums.

    Where gradients are sharded, a reduction waits for the one before, because each holds the flat gradients of a unit.
    `look` is called at peak memory, with flat gradients that `tensors` does not yield yet.
    """

    _by_stage: Mapping[int, Sequence[UnitGradients]]
    _data: DataAxis
    _replicas: ReplicaGroup
    _look: Callable[[Tensor | None], None]

    def __post_init__(self) -> None:
        self._units = list(dict.fromkeys(unit for units in self._by_stage.values() for unit in units))
        self._completions: dict[Action, Completion] = {}
        self._reducing: deque[UnitGradients] = deque()

    def completion(self, action: Action, program: Program) -> Completion:
        """The `Completion` of a REDUCE_GRAD.

        Its units go from the last layer to the first, as backwards finish them. Once per step, a unit that several
        stages of the rank share waits for the REDUCE_GRAD of the last of them.
        """
        if action not in self._completions:
            units = [*reversed(self._by_stage[action.stage])]
            if not self._data.shards_gradients or self._data.granularity is Granularity.STEP:
                order = next(order for order in program.orders if action in order)
                behind = order[order.index(action) + 1 :]
                later = {a.stage for a in behind if a.op is Op.REDUCE_GRAD and a.microbatch is not None}
                waiting = {unit for stage in later - {action.stage} for unit in self._by_stage.get(stage, ())}
                units = [unit for unit in units if unit not in waiting]
            self._completions[action] = Completion(units, self._start)
        return self._completions[action]

    def _start(self, unit: UnitGradients) -> None:
        if self._replicas.degree == 1:  # autograd accumulates in place until the run ends
            return
        if self._data.shards_optimizer:
            self._wait()
        unit.start(self._look)
        self._reducing.append(unit)

    def _wait(self) -> None:
        while self._reducing:
            self._reducing.popleft().wait_first()

    def finish(self, loss_scale: float) -> None:
        """All backwards are done: wait for all sums, and add them, divided by `loss_scale`, to main gradients."""
        if self._replicas.degree == 1:
            self._look(None)
            for unit in self._units:
                unit.start(self._look)
        self._wait()  # for the known reductions, before replicas exchange flags
        flags = iter(self._replicas.any([flag for unit in self._units for flag in (unit.late, *unit.present)]))
        present = {}
        for unit in self._units:
            if next(flags):  # on some replica, gradients came after their reduction had started
                self._start(unit)
            present[unit] = [next(flags) for _ in unit.present]
        self._wait()
        for unit in self._units:
            unit.deposit(present[unit], loss_scale)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that hold gradients now."""
        for unit in self._units:
            yield from unit.tensors()

    def begin(self) -> None:
        for unit in self._units:
            unit.begin()

    def drop(self) -> None:
        """Drop all state of the run."""
        self._reducing.clear()
        for completion in self._completions.values():
            completion.drop()
        for unit in self._units:
            unit.drop()
