"""How processes meet in a store in which others met, or failed to meet, before them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pipeloom.errors import PeerLost
from pipeloom.processes import rendezvous
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.launcher import Membership
from pipeloom.processes.rendezvous import Gpu, fresh_part


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


@pytest.mark.parametrize(
    ("gpus", "backend", "sharing"),
    [
        (["a", "b", "c"], "cpu:gloo,cuda:nccl", [1, 1, 1]),  # each sees one GPU alone: a different one
        (["a", "a", "a"], "gloo", [3, 3, 3]),
        (["a", "b", "a"], "gloo", [2, 1, 2]),  # the same backend for all, also for the one with a GPU of its own
        (["a", None, "b"], "gloo", [1, 1, 1]),
        ([None, None, None], "gloo", [1, 1, 1]),
    ],
)
def test_processes_tell_each_other_their_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str | None], backend: str, sharing: list[int]
) -> None:
    store, made = dist.HashStore(), []
    monkeypatch.setattr(rendezvous, "rendezvous", lambda meeting, rank, size: iter([(store, rank, size)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append(backend))

    def come(rank: int) -> int:
        member = Membership(rank, rank, 3, 3, "env://", BlackBox())
        return rendezvous.join(member, gpus[rank] and Gpu(gpus[rank], 3, one_each=False))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(come, range(3))) == sharing
    assert made == [backend] * 3


@pytest.mark.parametrize(("one_each", "backend"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_ranks_of_the_launcher_see_all_gpus(monkeypatch: pytest.MonkeyPatch, one_each: bool, backend: str) -> None:
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append(backend))
    member = Membership(1, 1, 3, 3, "file:///nowhere", BlackBox(), launched=True)
    assert rendezvous.join(member, Gpu("b", 1, one_each=one_each)) == 1
    assert made == [backend]
