"""`RankUpdate`: an update that is made before all ranks have agreed on it, and that can be undone."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.executor import Executor
from pipeloom.engine.result_exchange import total
from pipeloom.errors import InputError, RunError
from pipeloom.training.clipping import gradient_norms, total_norm
from pipeloom.training.optimizer_step import Update
from pipeloom.training.pipeline import Pipeline
from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing
from pipeloom.transport.values import flatten, unflatten


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


class Snapshot:
    """Copies of some parameters, their gradients and optimizer states. The memory is reused by the next snapshot.

    Copies restore every optimizer exactly. The inverse of an update would not: it divides what was multiplied.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._states: dict[nn.Parameter, dict[Any, Any]] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def take(self, parameters: Sequence[nn.Parameter], state: Mapping[Tensor, dict[Any, Any]]) -> None:
        """Copy the current values.

        Args:
            parameters: those that the update may change.
            state: of the optimizer; a parameter without an entry has no state yet.
        """
        changing = [p for p in parameters if p.grad is not None]  # optimizers skip the others
        self._gradients = {p: p.grad for p in changing if p.grad is not None}
        self._states = {
            p: {key: value if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state[p].items()}
            for p in changing
            if p in state
        }
        states = [value for entry in self._states.values() for value in entry.values() if isinstance(value, Tensor)]
        self._tensors = [*(p.detach() for p in changing), *self._gradients.values(), *states]
        kinds = [[(t.shape, t.dtype, t.device) for t in tensors] for tensors in (self._copies, self._tensors)]
        if kinds[0] == kinds[1]:
            _copy(self._copies, self._tensors)
        else:
            self._copies = [tensor.clone() for tensor in self._tensors]

    def restore(self, state: dict[Tensor, dict[Any, Any]]) -> None:
        """Restore the copied values."""
        with torch.no_grad():
            _copy(self._tensors, self._copies)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
            if parameter in self._states:
                state[parameter] = self._states[parameter]
            else:
                state.pop(parameter, None)

    def release(self) -> None:
        """Drop the references; keep the memory for the next snapshot."""
        self._tensors, self._states, self._gradients = [], {}, {}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch raises on empty lists; a rank may have nothing to train
        torch._foreach_copy_(targets, sources)


class RankUpdate:
    """The update of one rank."""

    def __init__(self, rank: int, pipeline: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._rank, self._pipeline, self._optimizer, self._max_norm = rank, pipeline, optimizer, max_norm
        self._all_parameters = pipeline.state.rank_parameters(rank)
        held = set(self._all_parameters)
        self._groups = [[p for p in group["params"] if p in held] for group in optimizer.param_groups]
        self._parameters = [parameter for group in self._groups for parameter in group]
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
            earlier = self._receive(shares, self._before[1])
            shares = _Shares(
                shares.norms + earlier.norms,
                shares.changes + earlier.changes,
                shares.numbers + earlier.numbers,
                {**shares.losses, **earlier.losses},
            )
        right = self._right_change(shares)
        # Shares only grow: what a partial sum clips or skips, the complete sum clips or skips too. Only the last rank
        # knows the clipping factor.
        self._change = right if self._behind is None or right is _Change.WHOLE else _Change.NONE
        shares.changes[self._rank] = self._change
        self._know(shares)
        if self._behind is not None and self._change is not _Change.NONE:
            self._snapshot.take(self._parameters, self._optimizer.state)
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
        return Update(total(shares.losses), total_norm(self._pipeline, shares.norms), applied, shares.numbers)

    def _know(self, shares: _Shares, *, is_all: bool = False) -> None:
        """Store shares and pass them on: to later ranks until the shares are complete, then to earlier ones."""
        self._shares, onward = shares, self._behind
        if self._behind is None or is_all:
            self.stands, onward = bool((shares.changes == self._right_change(shares)).all()), self._before
        if onward is not None:
            sums = torch.cat([shares.norms.flatten(), shares.changes, shares.numbers]).to(self._device)
            onward[0].send(*flatten((sums, shares.losses)), self._number)

    def _receive(self, like: _Shares, end: Incoming) -> _Shares:
        """The shares in a peer's message, whose parts have the same lengths as those of `like`."""
        message = end.receive()
        if message.call != self._number:
            raise RunError(
                f"rank {self._rank} is at update {self._number} and a neighbour at {message.call}: every rank must "
                "make the same calls in the same order. Look for a call that some ranks skip."
            )
        sums, losses = unflatten(message.layout, message.tensors)
        lengths = [part.numel() for part in (like.norms, like.changes, like.numbers)]
        norms, changes, numbers = torch.split(sums.cpu(), lengths)
        return _Shares(norms.view_as(like.norms), changes, numbers, losses)

    def _right_change(self, shares: _Shares) -> _Change:
        """The right change if these shares were complete."""
        norm, losses = total_norm(self._pipeline, shares.norms), shares.losses
        if not norm.isfinite() or (losses and not total(losses).isfinite()):
            return _Change.NONE
        # As torch.nn.utils.clip_grads_with_norm_ computes it, which scales where this is below 1.
        return _Change.CLIPPED if self._max_norm / (norm + 1e-6) < 1 else _Change.WHOLE

    def _apply(self, change: _Change) -> None:
        """Update this rank's parameters, with the options that the optimizer had at this step."""
        if change is _Change.NONE:
            return
        if change is _Change.CLIPPED:
            norm = total_norm(self._pipeline, self._shares.norms)
            torch.nn.utils.clip_grads_with_norm_(self._all_parameters, self._max_norm, norm)
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
