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

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.executor import Executor
from pipeloom.engine.result_exchange import total
from pipeloom.engine.worker import Bound, Worker
from pipeloom.errors import InputError, RunError
from pipeloom.training.gradient_norm import gradient_norms, total_norm
from pipeloom.training.optimizer_step import Numbers, OptimizerStep, Update
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.post_validation.snapshot import Snapshot
from pipeloom.training.post_validation.warm_up import SpeculativeWarmUp
from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing
from pipeloom.transport.values import Value, flatten, unflatten


class _Change(IntEnum):
    """What an update does to the parameters."""

    NONE = 0
    WHOLE = 1  # by the gradients as they are
    CLIPPED = 2  # by the gradients scaled down


@dataclass(frozen=True)
class _Shares:
    """The values that decide about an update, summed over some or all ranks.

    Attributes:
        norms: [2, parameters of the model], as `gradient_norms` returns it.
        changes: [ranks], the `_Change` that each rank made; 0 for ranks that are not in the sum.
        numbers: [n], numbers of the caller.
        losses: by micro-batch.
    """

    norms: Tensor
    changes: Tensor
    numbers: Tensor
    losses: dict[int, Tensor]

    def __add__(self, other: _Shares) -> _Shares:
        return _Shares(
            self.norms + other.norms,
            self.changes + other.changes,
            self.numbers + other.numbers,
            {**self.losses, **other.losses},
        )

    def send(self, end: Outgoing, device: torch.device, call: int) -> None:
        sums = torch.cat([self.norms.flatten(), self.changes, self.numbers]).to(device)
        end.send(*flatten((sums, self.losses)), call)

    def received(self, value: Any) -> _Shares:
        """The shares in a peer's message, whose parts have the same lengths as these."""
        sums, losses = value
        parts = torch.split(sums.cpu(), [self.norms.numel(), self.changes.numel(), self.numbers.numel()])
        return _Shares(parts[0].view_as(self.norms), parts[1], parts[2], losses)


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
        super().__init__(pipeline, optimizer, max_norm=max_norm)
        if not isinstance(optimizer.state, dict):
            raise InputError(
                f"PostValidatedStep does not support {type(optimizer).__name__}, which offloads its states: an update "
                "that may be undone needs them in memory. Use BarrierStep, or do not offload states."
            )
        self._executor = pipeline.executor
        ranks = self._executor.local_ranks
        self._ranks = {rank: _RankUpdate(rank, pipeline, optimizer, max_norm) for rank in ranks}
        self._warm_ups = {
            rank: SpeculativeWarmUp(update.ready, update.validate, draws_alone=len(ranks) == 1)
            for rank, update in self._ranks.items()
        }
        self._pending = False
        self.num_updates = 0
        self.num_repeats = 0

    @property
    def num_rollbacks(self) -> dict[int, int]:
        return {rank: update.num_rollbacks for rank, update in self._ranks.items()}

    def step(self, inputs: Value = None, targets: Value = None, numbers: Numbers | None = None) -> list[Update]:
        validates = self._executor.before_call == self._validate  # the previous update is not validated yet
        losses = self._pipeline.accumulate(inputs, targets, warm_up=self._warm_up if validates else None)
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

    def _warm_up(self, worker: Worker, bound: Bound) -> int:
        return self._warm_ups[worker.rank](worker, bound)

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


class _RankUpdate:
    """The update of one rank."""

    def __init__(self, rank: int, pipeline: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._rank = rank
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._all_parameters = pipeline.state.rank_parameters(rank)
        held = set(self._all_parameters)
        self._groups = [[p for p in group["params"] if p in held] for group in optimizer.param_groups]
        self._device = self._all_parameters[0].device if self._all_parameters else torch.device("cpu")
        self._before = _connected(pipeline.executor, rank, rank - 1)
        self._behind = _connected(pipeline.executor, rank, rank + 1)
        self._snapshot = Snapshot()
        self._options: list[dict[str, Any]] = []
        self._number = 0
        self._shares: _Shares  # the sum up to this rank; after validation, the complete sum
        self._change = _Change.NONE
        self.stands = True  # whether no rank made a wrong update
        self.num_rollbacks = 0

    @property
    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self._groups for parameter in group)

    def begin(self, number: int, losses: dict[int, Tensor], numbers: Tensor) -> None:
        """Update by the shares received so far, and pass them on."""
        self._number = number
        # A later step may have other options, such as a learning rate, before this one is validated.
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        shares = _Shares(
            gradient_norms(self._pipeline, self._rank),
            torch.zeros(self._pipeline.schedule.num_ranks, dtype=torch.float64),
            numbers,
            {microbatch: loss.detach() for microbatch, loss in losses.items()},
        )
        if self._before is not None:
            shares = shares + self._receive(shares, self._before[1])
        right = self._right_change(shares)
        # Shares only grow: what a partial sum clips or skips, the complete sum clips or skips too. Only the last rank
        # knows the clipping factor.
        self._change = right if self._behind is None or right is _Change.WHOLE else _Change.NONE
        shares.changes[self._rank] = self._change
        self._know(shares)
        if self._behind is not None and self._change is not _Change.NONE:
            self._snapshot.take(list(self._parameters), self._optimizer.state)
        self._apply(self._change)
        if self._behind is None:
            self._drop_gradients()

    def ready(self) -> bool:
        return self._behind is None or self._behind[1].ready()

    def validate(self) -> bool:
        """Wait for the complete sum, pass it on, and correct this rank's update; returns whether all were right."""
        if self._behind is None:  # this rank had all shares when it updated
            return self.stands
        self._know(self._receive(self._shares, self._behind[1]), is_all=True)
        right = self._right_change(self._shares)
        if self._change is not right:
            if self._change is not _Change.NONE:
                self._snapshot.restore(self._optimizer.state)
                self.num_rollbacks += 1
            self._apply(right)
        self._snapshot.release()
        self._drop_gradients()
        return self.stands

    def final(self) -> Update:
        """The result, after validation."""
        shares = self._shares
        applied = self._right_change(shares) is not _Change.NONE
        return Update(total(shares.losses), self._norm(shares), applied, shares.numbers)

    def _know(self, shares: _Shares, *, is_all: bool = False) -> None:
        """Store shares and pass them on: to later ranks until the shares are complete, then to earlier ones."""
        self._shares = shares
        if self._behind is not None and not is_all:
            shares.send(self._behind[0], self._device, self._number)
            return
        self.stands = bool((shares.changes == self._right_change(shares)).all())
        if self._before is not None:
            shares.send(self._before[0], self._device, self._number)

    def _receive(self, like: _Shares, end: Incoming) -> _Shares:
        message = end.receive()
        if message.call != self._number:
            raise RunError(
                f"rank {self._rank} is at update {self._number} and a neighbour at {message.call}: every rank must "
                "make the same calls in the same order. Look for a call that some ranks skip."
            )
        return like.received(unflatten(message.layout, message.tensors))

    def _norm(self, shares: _Shares) -> Tensor:
        return total_norm(self._pipeline, shares.norms)

    def _right_change(self, shares: _Shares) -> _Change:
        """The right change if these shares were complete."""
        norm, losses = self._norm(shares), shares.losses
        if not norm.isfinite() or (losses and not total(losses).isfinite()):
            return _Change.NONE
        # As torch.nn.utils.clip_grads_with_norm_ computes it, which scales where this is below 1.
        return _Change.CLIPPED if self._max_norm / (norm + 1e-6) < 1 else _Change.WHOLE

    def _apply(self, change: _Change) -> None:
        """Update this rank's parameters, with the options that the optimizer had at this step."""
        if change is _Change.NONE:
            return
        if change is _Change.CLIPPED:
            torch.nn.utils.clip_grads_with_norm_(self._all_parameters, self._max_norm, self._norm(self._shares))
        # A view of the optimizer with this rank's parameters only; the state is the same object.
        kind = type(self._optimizer)
        view = object.__new__(kind)
        view.__dict__ = {key: value for key, value in self._optimizer.__dict__.items() if key != "step"}
        groups = [
            {**options, "params": group} for options, group in zip(self._options, self._groups, strict=True) if group
        ]
        view.param_groups = [dict(group) for group in groups]
        kind.step(view)
        for before, after in zip(groups, view.param_groups, strict=True):
            written = sorted(key for key in after if after[key] is not before.get(key))
            if written:
                raise InputError(
                    f"{kind.__name__} writes {', '.join(written)} into its parameter groups: an update that may be "
                    "undone must keep its state per parameter. Use BarrierStep with this optimizer."
                )

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _connected(executor: Executor, rank: int, peer: int) -> tuple[Outgoing, Incoming] | None:
    """The channels of updates between a rank of this process and a neighbour; None at the ends of the pipeline."""
    num_ranks, transport = executor.programs.train.num_ranks, executor.connection.transport
    pairs = [(low, low + 1) for low in range(num_ranks - 1)]
    executor.open_channels(Channel(a, b, Lane.UPDATE) for pair in pairs for a, b in (pair, pair[::-1]))
    if not 0 <= peer < num_ranks:
        return None
    outgoing = transport.outgoing(Channel(rank, peer, Lane.UPDATE))
    return outgoing, transport.incoming(Channel(peer, rank, Lane.UPDATE))
