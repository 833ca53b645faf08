"""`PartnerCopies`: each copy of a rank's state has a twin on the next machine, from which it comes back after a loss.

machine 0                                machine 1
rank 0   rank-0, rank-2    ◀──────────   rank 2   rank-2, rank-0
rank 1   rank-1, rank-3    ──────────▶   rank 3   rank-3, rank-1
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.train.recovery.state_copies import StateCopies


class PartnerCopies:
    """The copies that this process holds for the rank before it, and the exchange of copies.

    Args:
        rank: of this process.
        size: number of processes.
        near: processes per machine: the next machine's rank is this one's plus `near`.
        own: copies of this process's state.
        held: copies of the state of `held_rank`.
    """

    def __init__(self, rank: int, size: int, near: int, own: StateCopies, held: StateCopies) -> None:
        self._rank, self._own, self._held = rank, own, held
        self._next, self.held_rank = partners(rank, size, near)

    @property
    def held_steps(self) -> list[int]:
        """The steps after which the held copies were made."""
        return self._held.steps

    def exchange(self, step: int) -> None:
        """Send the copy of `step` to the next machine, and hold that of the rank before; a collective call."""
        with noticing_lost_peers():
            head = torch.tensor(self._own.head(step))
            other = torch.empty_like(head)
            _wait(dist.isend(head, self._next), dist.irecv(other, self.held_rank))
            room = self._held.open(*other.tolist())
            _wait(dist.isend(self._own.packed(step), self._next), dist.irecv(room, self.held_rank))
        self._held.seal(step)

    def give_back(self, step: int, receivers: Mapping[int, int]) -> None:
        """Receivers get their copy of `step` from the rank that holds it; every process calls it.

        Args:
            step: after which each copy was made.
            receivers: rank without its copy -> rank that holds one.
        """
        with noticing_lost_peers():
            for rank, holder in receivers.items():
                if self._rank == holder:
                    dist.send(torch.tensor(self._held.head(step)), rank)
                    dist.send(self._held.packed(step), rank)
                elif self._rank == rank:
                    head = torch.empty(2, dtype=torch.int64)
                    dist.recv(head, holder)
                    dist.recv(self._own.open(*head.tolist()), holder)
                    self._own.seal(step)

    def drop_after(self, step: int) -> None:
        """Forget held copies of later steps."""
        self._held.drop_after(step)


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
