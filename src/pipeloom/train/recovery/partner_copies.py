"""`PartnerCopies`: each copy of a rank's state has a twin on the next machine, from which it comes back after a loss.

machine 0                                machine 1
rank 0   rank-0, rank-2    ◀──────────   rank 2   rank-2, rank-0
rank 1   rank-1, rank-3    ──────────▶   rank 3   rank-3, rank-1

After a loss, machines may have other ranks than before. What a machine has of its ranks before then comes back too, and
its memory is freed as soon as all ranks have copies where they are now.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.waits import waits_for
from pipeloom.train.recovery.state_copies import StateCopies


class PartnerCopies:
    """The copies that this process holds of the states of other ranks, and the exchange of copies.

    Args:
        rank: of this process.
        size: number of processes.
        near: processes per machine: the next machine's rank is this one's plus `near`.
        own: copies of this process's state.
        held: by rank, copies of the states of others: of the rank before, and of those that the machine had before.
    """

    def __init__(self, rank: int, size: int, near: int, own: StateCopies, held: Mapping[int, StateCopies]) -> None:
        self._rank, self._own, self._held = rank, own, dict(held)
        self._near, (self._next, self._before) = near, partners(rank, size, near)

    @property
    def held_steps(self) -> dict[int, list[int]]:
        """By rank, the steps after which the held copies were made."""
        return {rank: copies.steps for rank, copies in self._held.items()}

    @waits_for(lambda at: (at["self"]._next, at["self"]._before))
    def exchange(self, step: int) -> None:
        """Send the copy of `step` to the next machine, and hold that of the rank before; a collective call."""
        self._own.renumber(step)
        held = self._held[self._before]
        with noticing_lost_peers():
            head = torch.tensor(self._own.head(step))
            other = torch.empty_like(head)
            _wait(dist.isend(head, self._next), dist.irecv(other, self._before))
            *sizes, recovery = other.tolist()
            room = held.open(*sizes)
            _wait(dist.isend(self._own.packed(step), self._next), dist.irecv(room, self._before))
        held.seal(step, recovery)

    def number_recovery(self, gather: Callable[[Any], list[Any]]) -> None:
        """Number this recovery, and forget copies of steps that the run has trained again since; a collective call.

        A machine that was lost and comes back may have such copies, and so may one that has other ranks than before.

        Args:
            gather: all-gathers a JSON value over processes.

        Raises:
            InputError: machines have different numbers of processes.
        """
        every = [self._own, *self._held.values()]
        rows = gather([time.time_ns(), self._near, [pair for copies in every for pair in copies.made.items()]])
        if len(near := sorted({each for _, each, _ in rows})) > 1:
            raise InputError(
                f"recover=true: machines have {near[0]} and {near[-1]} processes, but copies go to a machine with "
                "as many. Start the same number of processes on each machine, or remove --recover."
            )
        newest: dict[int, int] = dict(sorted((step, number) for _, _, made in rows for step, number in made))
        for copies in every:
            copies.keep(newest)
        self._own.recovery = max([now for now, _, _ in rows] + [1 + number for number in newest.values()])

    def give_back(self, step: int, receivers: Mapping[int, int]) -> None:
        """Receivers get their copy of `step` from the rank that holds it; every process calls it.

        Args:
            step: after which each copy was made.
            receivers: rank without its copy -> rank that holds one.
        """
        with noticing_lost_peers():
            for rank, holder in receivers.items():
                if self._rank == holder:
                    dist.send(torch.tensor(self._held[rank].head(step)), rank)
                    dist.send(self._held[rank].packed(step), rank)
                elif self._rank == rank:
                    head = torch.empty(3, dtype=torch.int64)
                    dist.recv(head, holder)
                    *sizes, recovery = head.tolist()
                    dist.recv(self._own.open(*sizes), holder)
                    self._own.seal(step, recovery)

    def drop_after(self, step: int) -> None:
        """Forget held copies of later steps."""
        for copies in self._held.values():
            copies.drop_after(step)

    def release_others(self) -> None:
        """All ranks have copies where they are now: free the memory of those that the machine had before."""
        for rank in self._held.keys() - {self._before}:
            self._held.pop(rank).release()


def partners(rank: int, size: int, near: int) -> tuple[int, int]:
    """The rank that holds a rank's copies, and the rank whose copies it holds."""
    return (rank + near) % size, (rank - near) % size


def receivers_of(
    step: int, steps: Sequence[Sequence[int]], held: Sequence[Mapping[int, Sequence[int]]]
) -> dict[int, int]:
    """The ranks that have no copy of `step`, and which rank holds one for each.

    Args:
        step: of the copies.
        steps: of each rank's own copies.
        held: for each rank, whose copies it holds, of which steps.
    """
    found = {}
    for rank, own in enumerate(steps):
        if step not in own:
            found[rank] = next(other for other, each in enumerate(held) if step in each.get(rank, ()))
    return found


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        if work is not None:
            work.wait()
