"""`Reductions`: the sums over copies of one rank's gradients, from the first that starts to the deposit of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pipeloom.ir import Action, DataAxis, Granularity, Op, Program
from pipeloom.parallel.data.layer_hooks import Completion
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit import Unit


class Reductions:
    """Those of one run after the other.

    Args:
        units: all of the rank's.
        by_stage: the units of each stage, in its order.
        axis: how copies share the work. Where gradients are to be sharded, one reduction waits for the one before: each
            holds a whole bucket's.
        copies: over whom to sum.
        look: called when gradients take the most memory, with what is in no unit yet.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        by_stage: Mapping[int, Sequence[Unit]],
        axis: DataAxis,
        copies: ReplicaGroup,
        look: Callable[[Tensor | None], None],
    ) -> None:
        self._units, self._by_stage, self._axis, self._copies, self._look = units, by_stage, axis, copies, look
        self._completions: dict[Action, Completion] = {}
        self._on_their_way: deque[Unit] = deque()

    def completion(self, action: Action, program: Program) -> Completion:
        """Of a REDUCE_GRAD: what starts its reductions."""
        if action not in self._completions:
            self._completions[action] = Completion(self._reduced_at(action, program), self._start)
        return self._completions[action]

    def _reduced_at(self, action: Action, program: Program) -> list[Unit]:
        """The units of a REDUCE_GRAD: the last layer first, as backwards complete them."""
        own = self._by_stage[action.stage]
        if self._axis.shards_gradients and self._axis.granularity is not Granularity.STEP:
            return [*reversed(own)]
        elsewhere = {unit for stage, units in self._by_stage.items() if stage != action.stage for unit in units}
        shared = [unit for unit in own if unit in elsewhere]
        order = next(order for order in program.orders if action in order)
        behind = order[order.index(action) + 1 :]
        later = {a.stage for a in behind if a.op is Op.REDUCE_GRAD and a.microbatch is not None}
        waiting = {unit for unit in shared if any(unit in self._by_stage[stage] for stage in later)}
        return [unit for unit in reversed(own) if unit not in waiting]

    def _start(self, unit: Unit) -> None:
        """Begin to sum the gradients of a unit; does not wait for it."""
        if self._copies.degree == 1:  # nobody to sum with: until the end autograd goes on adding up, in one place
            return
        if self._axis.shards_optimizer:
            self._wait()
        unit.gradients.start(self._look)
        self._on_their_way.append(unit)

    def finish(self, loss_scale: float) -> None:
        """All backwards are done: wait for all sums, and add them, divided by `loss_scale`, to main gradients."""
        if self._copies.degree == 1:
            self._look(None)
            for unit in self._units:
                unit.gradients.start(self._look)
        self._wait()  # before others are waited for: it is known when they are done
        known = [unit.gradients for unit in self._units]
        flags = iter(self._copies.any([flag for g in known for flag in (g.late, *g.present)]))
        present = {}
        for unit in self._units:
            if next(flags):  # on some copy gradients came after its reduction had started
                self._start(unit)
            present[unit] = [next(flags) for _ in unit.gradients.present]
        self._wait()
        for unit in self._units:
            unit.gradients.deposit(present[unit], loss_scale)

    def drop(self) -> None:
        """Forget what a run left."""
        self._on_their_way.clear()
        for completion in self._completions.values():
            completion.drop()
        for unit in self._units:
            unit.gradients.drop()

    def _wait(self) -> None:
        """For all that are on their way."""
        while self._on_their_way:
            self._on_their_way.popleft().gradients.finish_first()
