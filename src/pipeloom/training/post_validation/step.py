"""The optimizer step without a barrier: post-validation (Zero Bubble, arXiv:2401.10241, section 4).

Clipping and the check for finite gradients need the gradients of all ranks, so with a barrier all ranks wait for the
slowest. The result is nearly always "update, without clipping". Here each rank adds its share to the sum of the earlier
ranks, passes the sum on, updates as if it were complete, and begins its next step. The last rank has the complete sum
and sends it back to the earlier ranks, which receive it during their warm-up and validate their update.

    rank 0   B W W |U0| F F F F F . . . V B        U0..U2: update, by the sum of the shares so far
    rank 1     B W W |U1| F F F . . . V B          U2 has the complete sum
    rank 2       B W W |U2| F B                    V: validate, before the first backward
              shares ─▶ ─▶   ◀─ ◀─ all shares

If the update of any rank was wrong, all ranks cancel the forwards of their warm-up, the ranks with a wrong update undo
it and make the right one, and all ranks begin the step again. At its first backward, every rank therefore has bitwise
the same values as with a barrier.
"""

import math

import torch

from pipeloom.errors import InputError
from pipeloom.training.optimizer_step import Numbers, OptimizerStep, Update
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.post_validation.rank_update import RankUpdate
from pipeloom.training.post_validation.warm_up import SpeculativeWarmUp
from pipeloom.transport.values import Value


class PostValidatedStep(OptimizerStep):
    """Updates without waiting for later ranks; a rank whose update was wrong undoes and repeats it.

    Works with torch optimizers whose update of a parameter depends only on that parameter, its gradient, its state and
    the options of its group. Each rank holds a second copy of its parameters, gradients and optimizer state. Other
    calls of the pipeline settle first. Call `settle` before you read weights or optimizer state, and at the end.

    Attributes:
        num_updates: updates so far.
        num_rollbacks: for each rank of this process, the number of updates that it undid.
        num_repeats: the number of repeated warm-ups.

    Raises:
        InputError: see `OptimizerStep`; later, an optimizer that keeps state in the options of its groups.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf) -> None:
        if pipeline.state.sharing.axis is not None:
            raise InputError(
                "PostValidatedStep supports neither data parallelism nor 16-bit formats: it updates the model's own "
                "parameters. Use BarrierStep."
            )
        if pipeline.state.sharing.blocks.divides:
            raise InputError(
                "PostValidatedStep does not support tensor parallelism: each rank cancels forwards by itself, and the "
                "ranks that share a stage would not make the same collectives. Use BarrierStep."
            )
        super().__init__(pipeline, optimizer, max_norm=max_norm)
        if not isinstance(optimizer.state, dict):
            raise InputError(
                f"PostValidatedStep does not support {type(optimizer).__name__}, which offloads its states: an update "
                "that may be undone needs them in memory. Use BarrierStep, or do not offload states."
            )
        self._executor = pipeline.executor
        ranks = self._executor.local_ranks
        self._ranks = {rank: RankUpdate(rank, pipeline, optimizer, max_norm) for rank in ranks}
        self._warm_ups = {
            rank: SpeculativeWarmUp(update, draws_alone=len(ranks) == 1) for rank, update in self._ranks.items()
        }
        self._pending = False
        self.num_updates = 0
        self.num_repeats = 0

    @property
    def num_rollbacks(self) -> dict[int, int]:
        return {rank: update.num_rollbacks for rank, update in self._ranks.items()}

    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        validates = self._executor.before_call == self._validate  # the previous update is not validated yet
        warm_up = (lambda worker, bound: self._warm_ups[worker.rank](worker, bound)) if validates else None
        losses = self._pipeline.accumulate(inputs, targets, warm_up=warm_up)
        final = self._final()
        own = numbers().double() if numbers is not None else torch.empty(0, dtype=torch.float64)
        self.num_updates += 1
        with self._executor.ended_by_errors():
            for update in self._ranks.values():
                update.begin(self.num_updates, losses, own)
                losses, own = {}, torch.zeros_like(own)  # only the first rank of a process adds them
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or learning rate schedulers warn
        self._pending = True
        self._executor.before_call = self._validate
        return final

    def settle(self) -> list[Update]:
        self._executor.settle()
        return self._final()

    def _validate(self) -> None:
        """Make the update final on all ranks of this process, before any other call runs."""
        with self._executor.ended_by_errors():
            for update in reversed(self._ranks.values()):  # the last rank has the sum first
                update.validate()
            self._executor.connection.transport.end_step()

    def _final(self) -> list[Update]:
        """The previous update, which all ranks of this process have validated."""
        if not self._pending:
            return []
        self._pending = False
        first = next(iter(self._ranks.values()))
        self.num_repeats += not first.stands
        return [first.final()]
