"""How processes meet in a store in which others met, or failed to meet, before them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pipeloom.errors import PeerLost
from pipeloom.processes.rendezvous import fresh_part


def attempt(store: dist.Store, ranks: list[int], seconds: float) -> list[int | str]:
    """These of three ranks meet: as what number each came into its part of the store, or why it did not."""

    def come(rank: int) -> int | str:
        try:
            return fresh_part(store, rank, 3, seconds).add("came", 1)
        except PeerLost as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(come, ranks))


@pytest.mark.parametrize("alive", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_processes_that_are_started_again_meet_in_a_part_of_their_own(alive: list[int]) -> None:
    """Between whole attempts there are some of which processes died before all had met."""
    store = dist.HashStore()
    for _ in range(2):
        assert sorted(attempt(store, [0, 1, 2], 60)) == [1, 2, 3]
        answers = attempt(store, alive, 0.05)
        assert not alive or any("waited 0.05 s for the other ranks to start" in str(answer) for answer in answers)
    assert sorted(attempt(store, [0, 1, 2], 60)) == [1, 2, 3]
