"""`Reductions`: when each unit's gradients are summed over replicas.

A sharded reduction waits for the one before, which a replica without some of its gradients starts only after its
backward. Replicas that also communicate inside backwards, along axes ep or cp, must not wait there for each other: no
backward would end. So in their first step they start no reduction that would wait inside a backward, and later ones
neither, once gradients came on some replicas alone. Where that happens for the first time in a later step, replicas
wait until their timeout. `pipeloom.models.experts` has gradients for all experts, of zeros where no token chose one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipeloom.ir import Action, DataAxis, Granularity, Op, Program
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit_gradients import UnitGradients


class Completion:
    """Starts the reductions of one REDUCE_GRAD inside the last backward that it covers.

    All replicas reduce the `units` in their order. `may_start` says whether one may start inside a backward.
    """

    def __init__(
        self, units: Sequence[UnitGradients], start: Callable[[UnitGradients], None], may_start: Callable[[], bool]
    ) -> None:
        self._units, self._start, self._may_start = units, start, may_start
        self._queue: deque[UnitGradients] = deque()
        self._missing: dict[UnitGradients, set[int]] = {}
        self._begun = False

    def begin(self) -> None:
        """The last backward begins."""
        shared = (unit for unit in self._units if not unit.is_alone)  # others accumulate in place until the run ends
        self._queue.extend(unit for unit in shared if any(p.requires_grad for p in unit.parameters))
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
            while self._queue and not self._missing[self._queue[0]] and self._may_start():
                self._start(self._queue.popleft())

    def reach(self, unit: UnitGradients) -> None:
        """All gradients of `unit` are computed. Called in the order of the units, also for those not reduced here."""
        if self._queue and self._queue[0] is unit:
            self._start(self._queue.popleft())

    def flush(self) -> None:
        """Start all that remain, also units with missing gradients."""
        if not self._begun:
            self.begin()
        for unit in self._missing:
            unit.arrivals.add(not self._missing[unit])
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
    `look` is called at peak memory, with flat gradients that `tensors` does not yield yet. `meets`: whether replicas
    also communicate inside backwards.
    """

    _by_stage: Mapping[int, Sequence[UnitGradients]]
    _data: DataAxis
    _replicas: ReplicaGroup
    _look: Callable[[Tensor | None], None]
    _meets: bool = False

    def __post_init__(self) -> None:
        self._units = list(dict.fromkeys(unit for units in self._by_stage.values() for unit in units))
        self._completions: dict[Action, Completion] = {}
        self._reducing: deque[UnitGradients] = deque()
        self._meets &= self._data.strategy.shards_optimizer
        self._is_known = self._differs = False  # whether replicas found gradients for other parameters in a backward

    def completion(self, action: Action, program: Program) -> Completion:
        """The `Completion` of a REDUCE_GRAD.

        Its units go from the last layer to the first, as backwards finish them. Once per step, a unit that several
        stages of the rank share waits for the REDUCE_GRAD of the last of them.
        """
        if action not in self._completions:
            units = [*reversed(self._by_stage[action.stage])]
            if not self._data.strategy.shards_gradients or self._data.granularity is Granularity.STEP:
                order = next(order for order in program.orders if action in order)
                behind = order[order.index(action) + 1 :]
                later = {a.stage for a in behind if a.op is Op.REDUCE_GRAD and a.microbatch is not None}
                waiting = {unit for stage in later - {action.stage} for unit in self._by_stage.get(stage, ())}
                units = [unit for unit in units if unit not in waiting]
            self._completions[action] = Completion(units, self._start, self._may_start)
        return self._completions[action]

    def _may_start(self) -> bool:
        """Whether a reduction may start inside a backward: not where it would wait for a replica that waits there."""
        return not (self._reducing and self._meets and (self._differs or not self._is_known))

    def _start(self, unit: UnitGradients) -> None:
        if self._data.strategy.shards_optimizer:
            self._wait()
        unit.start(self._look)
        self._reducing.append(unit)

    def _wait(self) -> None:
        while self._reducing:
            self._reducing.popleft().wait_first()

    def finish(self, loss_scale: float) -> None:
        """All backwards are done: wait for all sums, and add them, divided by `loss_scale`, to main gradients."""
        alone = [unit for unit in self._units if unit.is_alone]
        if alone:
            self._look(None)
        for unit in alone:
            unit.start(self._look)
        self._wait()  # for the known reductions, before replicas exchange flags
        own = [flag for unit in self._units for flag in (unit.late, *unit.present)]
        if self._meets:
            own += [all_came in unit.arrivals for unit in self._units for all_came in (True, False)]
        flags = iter(self._replicas.any(own))
        present = {}
        for unit in self._units:
            if next(flags):  # on some replica, gradients came after their reduction had started
                self._start(unit)
            present[unit] = [next(flags) for _ in unit.present]
        came = list(flags)
        self._differs |= any(map(all, zip(came[::2], came[1::2], strict=True)))
        self._is_known = True
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
