"""`Reductions`: when the gradients of each unit of one rank are summed over replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from pipeloom.ir import Action, DataAxis, Granularity, Op, Program
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit_gradients import UnitGradients


class Completion:
    """Starts the reductions of one REDUCE_GRAD inside the last backward that it covers.

    Args:
        units: in the order in which all replicas reduce them.
        start: starts one reduction.
    """

    def __init__(self, units: Sequence[UnitGradients], start: Callable[[UnitGradients], None]) -> None:
        self._units, self._start = units, start
        self._queue: deque[UnitGradients] = deque()
        self._missing: dict[UnitGradients, set[int]] = {}
        self._begun = False

    def begin(self) -> None:
        """The last backward begins."""
        self._queue.extend(unit for unit in self._units if unit.trains)
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

    def _arrived(self, unit: UnitGradients, index: int, _: Tensor) -> None:
        missing = self._missing.get(unit)
        if missing is None:
            return
        missing.discard(index)
        while self._queue and not self._missing[self._queue[0]]:
            self._start(self._queue.popleft())


class Reductions:
    """The reductions of one rank over replicas, from the first that starts to the deposit of all sums.

    Args:
        by_stage: the units of each stage, in its order.
        data: the data axis. Where gradients are sharded, a reduction waits for the one before, because each holds the
            flat gradients of a unit.
        replicas: the processes to sum over.
        look: called at peak memory, with flat gradients that `tensors` does not yield yet.
    """

    def __init__(
        self,
        by_stage: Mapping[int, Sequence[UnitGradients]],
        data: DataAxis,
        replicas: ReplicaGroup,
        look: Callable[[Tensor | None], None],
    ) -> None:
        self._by_stage, self._data, self._replicas, self._look = by_stage, data, replicas, look
        self._units = list(dict.fromkeys(unit for units in by_stage.values() for unit in units))
        self._completions: dict[Action, Completion] = {}
        self._reducing: deque[UnitGradients] = deque()

    def completion(self, action: Action, program: Program) -> Completion:
        """The `Completion` of a REDUCE_GRAD."""
        if action not in self._completions:
            self._completions[action] = Completion(self._reduced_at(action, program), self._start)
        return self._completions[action]

    def _reduced_at(self, action: Action, program: Program) -> list[UnitGradients]:
        """The units of a REDUCE_GRAD, from the last layer to the first, as backwards finish them.

        Once per step, a unit that several stages of the rank share waits for the REDUCE_GRAD of the last of them.
        """
        own = self._by_stage[action.stage]
        if self._data.shards_gradients and self._data.granularity is not Granularity.STEP:
            return [*reversed(own)]
        order = next(order for order in program.orders if action in order)
        behind = order[order.index(action) + 1 :]
        later = {a.stage for a in behind if a.op is Op.REDUCE_GRAD and a.microbatch is not None} - {action.stage}
        waiting = {unit for stage in later for unit in self._by_stage.get(stage, ())}
        return [unit for unit in reversed(own) if unit not in waiting]

    def _start(self, unit: UnitGradients) -> None:
        """Start the reduction of a unit without waiting."""
        if self._replicas.degree == 1:  # autograd accumulates in place until the run ends
            return
        if self._data.shards_optimizer:
            self._wait()
        unit.start(self._look)
        self._reducing.append(unit)

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

    def drop(self) -> None:
        """Drop all state of the run."""
        self._reducing.clear()
        for completion in self._completions.values():
            completion.drop()
        for unit in self._units:
            unit.drop()

    def begin(self) -> None:
        """A run begins."""
        for unit in self._units:
            unit.begin()

    def _wait(self) -> None:
        """Wait for all reductions that have started."""
        while self._reducing:
            self._reducing.popleft().wait_first()
