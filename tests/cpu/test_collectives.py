"""Groups of closed pipelines and meshes are gone; only another process that is gone is called lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost
from pipeloom.parallel.data.links import Links
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.processes.collectives import all_reduce, noticing_lost_peers
from pipeloom.transport import Channel, Lane, torch_distributed
from pipeloom.transport.torch_distributed import TorchDistributedTransport
from pipeloom.transport.values import flatten
from tests.cpu.ranks import run_ranks


def _held() -> tuple[int, int, int]:
    """Threads, descriptors and registered process groups of this process."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups


def _more(held: tuple[int, int, int], wanted: tuple[int, int, int]) -> bool:
    """Whether there is more of anything. Less is no fault: what others let go of may still have been in `wanted`."""
    return any(a > b for a, b in zip(held, wanted, strict=True))


def _settles_at(wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is held when it is no more than `wanted`, or after a while: other processes let go a moment later."""
    deadline = time.monotonic() + 60
    while _more(held := _held(), wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def _many_pipelines(rank: int) -> list[tuple[int, int, int]]:
    """What is held after each of several meshes with a pipeline, all kept by their user."""
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    held, kept = [], []
    for _ in range(5):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with (
            pl.Mesh(pp=2, dp=2) as mesh,
            pl.Pipeline(
                model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data="zero3", transport="torch"
            ) as pipe,
        ):
            pipe.step(torch.ones(4, 4), torch.ones(4, 4))
        kept.append((mesh, pipe))
        held.append(_settles_at(held[0]) if held else _held())
    with pytest.raises(InputError, match="is closed: its process groups are closed too"):
        mesh.group("dp")
    dist.barrier()
    return held


def test_closed_pipelines_and_meshes_leave_no_group_thread_or_socket() -> None:
    for held in run_ranks(_many_pipelines, 4):
        assert not _more(held[-1], held[0]), held
        assert held[0][2] == 1


def _close_apart(rank: int, gate: Any, told: Any, peer_dies: bool) -> list[bool]:
    """Rank 0 closes; rank 1 closes when it has, or died before. Whether no more is held than before, twice."""
    torch_distributed._CLOSING_SECONDS = 0.2  # the other one closes much later than that
    both = [Channel(0, 1, Lane.PIPELINE), Channel(1, 0, Lane.PIPELINE)]
    before, answers = _held(), []
    for _ in range(2):
        transport = TorchDistributedTransport(rank, device=torch.device("cpu"), timeout_seconds=120)
        transport.open(both)
        transport.outgoing(both[rank]).send(*flatten(torch.full((5000,), float(rank))))
        assert float(transport.incoming(both[1 - rank]).receive().tensors[0][0]) == 1 - rank
        dist.barrier()
        if rank == 1 and peer_dies:
            os._exit(0)
        if rank == 1:
            gate.wait()
        transport.close()
        if peer_dies:
            told.send(_settles_at(before)[0] <= before[0])
            os._exit(0)
        gate.set()
        dist.barrier()
        answers.append(not _more(_settles_at(before), before))
        gate.clear()
        dist.barrier()
    return answers


def test_a_channel_whose_ends_close_apart_goes_when_both_have() -> None:
    assert run_ranks(_close_apart, 2, get_context("fork").Event(), None, False) == [[True, True]] * 2


def test_a_channel_whose_other_end_died_goes() -> None:
    reader, writer = get_context("fork").Pipe(duplex=False)
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(_close_apart, 2, None, writer, True)
    assert reader.poll(0)
    assert reader.recv()
    reader.close(), writer.close()


def _late_and_gone(rank: int, gate: Any) -> list[str]:
    """What a wait for a process that is late says, and one for a process that is gone."""
    mesh = pl.Mesh(pp=1, dp=2)
    replicas = ReplicaGroup(mesh, timeout_seconds=0.1)
    if rank == 1:
        gate.wait()
        return []
    with pytest.raises(PeerLost) as late:
        replicas.sum_in_order(torch.ones(1))
    gate.set()
    with pytest.raises(PeerLost) as gone:
        all_reduce(torch.ones(1), mesh.cpu_group, 120.0)
    return [str(late.value), str(gone.value)]


def test_who_is_late_or_gone_is_lost() -> None:
    late, gone = run_ranks(_late_and_gone, 2, get_context("fork").Event())[0]
    assert late.startswith("another replica exited or did not answer in time")
    assert gone.startswith("another process ended, or timed out, during a collective")


def _out_of_memory(*_: object, **__: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _no_host_memory(*_: object, **__: object) -> Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8)


def _sick_device(*_: object, **__: object) -> Tensor:
    raise torch.AcceleratorError("CUDA error: the launch timed out and was terminated")


def _nccl_out_of_memory(*_: object, **__: object) -> Tensor:
    raise dist.DistBackendError("NCCL error: ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'")


def _nccl_peer_gone(*_: object, **__: object) -> Tensor:
    raise dist.DistBackendError("NCCL error: ncclRemoteError: socketProgress: Connection closed by remote peer")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (_out_of_memory, torch.OutOfMemoryError),
        (_no_host_memory, RuntimeError),
        (_sick_device, torch.AcceleratorError),
        (_nccl_out_of_memory, dist.DistBackendError),
        (_nccl_peer_gone, PeerLost),
    ],
)
def test_faults_of_this_process_alone_stay_what_they_are(fault: Callable[..., Tensor], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, noticing_lost_peers():
        fault()
    assert isinstance(caught.value, PeerLost) == (kind is PeerLost)


class _NoMemory(Links):
    """Two copies, whose collectives fail."""

    degree, index, backend = 2, 0, "gloo"
    broadcast = reduce = all_reduce = exchange = on_end = _out_of_memory


class _TwoCopies:
    """As much of a mesh as copies ask for."""

    def degree(self, axis: str) -> int:
        return 2

    def line(self, *axes: str) -> tuple[int, ...]:
        return 0, 1

    def links(self, *axes: str) -> Links:
        return _NoMemory()


def test_no_memory_in_a_collective_of_copies_is_no_lost_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", _out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ReplicaGroup(_TwoCopies()).all_reduce(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        all_reduce(torch.ones(1), None, 1.0)  # type: ignore[arg-type]


def _one_refuses(rank: int, num_ranks: int) -> tuple[list[str], float]:
    """What is said where copy 1 alone has a batch that it cannot take; and the loss of a step behind it."""
    mesh = pl.Mesh(pp=num_ranks, dp=2)
    copy, said = mesh.coordinate("dp"), []
    schedule = pl.schedules.one_f_one_b(num_ranks=num_ranks, num_microbatches=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, timeout_seconds=120)
    good = torch.ones(4, 4)
    for bad in (None, torch.ones(1, 4), {4}):
        with pytest.raises(InputError) as caught:
            pipe.step(bad if copy else good, bad if copy else good)
        said.append(str(caught.value))
    loss = float(pipe.step(good, good))
    pipe.close()
    return said, loss


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_that_one_copy_refuses_is_refused_by_all(num_ranks: int) -> None:
    answers = run_ranks(_one_refuses, 2 * num_ranks, num_ranks)
    assert len({loss for _, loss in answers}) == 1
    for said, _ in answers:
        for part, text in zip(["=None: the rank with", "1 samples", "hold a value of type set"], said, strict=True):
            assert part in text
    assert "cannot use its batch, so no rank runs this call: " in answers[0][0][0]
