"""Binders of OFFLOAD and RELOAD, and what they need: somebody who moves what forwards saved.

F         catches what autograd saves                        (only where an OFFLOAD follows)
OFFLOAD   begins to move it away: the graph keeps no numbers
RELOAD    begins to bring it back
B, I      wait until it is there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import Key, RankState, Step
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program
from pipeloom.transport.values import flatten


class ActivationMover(ABC):
    """Moves what one rank's forwards saved; a key is (stage, micro-batch, slice).

    Attributes:
        moved_bytes: written and read so far.
        wait_seconds: how long the rank has waited for it so far.
        times: where it notes moves.
    """

    moved_bytes: int
    wait_seconds: float
    times: OverlapTimes

    @abstractmethod
    def catching(self, key: Key) -> AbstractContextManager[None]:
        """Around a forward: notes what autograd saves."""

    @abstractmethod
    def offload(self, key: Key, leaves: Sequence[Tensor], held: Set[int]) -> None:
        """Begin to move away what was noted, and the numbers of `leaves`; not storages (``_cdata``) that are `held`."""

    @abstractmethod
    def reload(self, key: Key) -> None:
        """Begin to bring it back."""

    @abstractmethod
    def arrive(self, key: Key) -> None:
        """Wait until it is there. Raises RunError where it was lost on the way."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of everything that is noted or away."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads."""


class OffloadOptions(Protocol):
    """What a `Pipeline` is given."""

    def insert(self, program: Program) -> Program:
        """The program with OFFLOAD and RELOAD."""

    def open(self, device: torch.device) -> Callable[[], ActivationMover]:
        """What makes the mover of each rank of this process."""


def bind_offload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)
    saved, module = state.saved, state.stages[action.stage]
    context_key = (action.stage, action.microbatch)

    def offload() -> None:
        held = saved[key]
        assert isinstance(held, tuple)
        assert action.microbatch is not None
        elsewhere: list[Tensor] = [*module.parameters(), *module.buffers()]
        for values in (state.batch.inputs, state.batch.targets):
            if values:
                elsewhere += flatten(values[action.microbatch])[1]
        if context_key in state.contexts:
            elsewhere += state.contexts[context_key].tensors()
        mover.offload(key, held[0], {tensor.untyped_storage()._cdata for tensor in elsewhere})
        state.num_away += 1

    return offload, None


def bind_reload(state: RankState, action: Action, program: Program) -> Step:
    mover, key = _mover_of(state, action), (action.stage, action.microbatch, action.slice)

    def reload() -> None:
        mover.reload(key)
        state.num_away -= 1
        state.note_live()

    return reload, None


def _mover_of(state: RankState, action: Action) -> ActivationMover:
    if state.mover is None:
        raise InputError(
            f"action {action} on rank {state.rank}: nobody was told where activations go; pass offload to Pipeline"
        )
    return state.mover


def moved_keys(program: Program, rank: int) -> frozenset[Key]:
    """The activations that an OFFLOAD of a rank moves."""
    return frozenset((a.stage, a.microbatch, a.slice) for a in program.orders[rank] if a.op is Op.OFFLOAD)
