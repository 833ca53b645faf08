"""NCCL communicators, with stand-ins for NCCL: made before the first step, in one order, and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import pipeloom as pl
from pipeloom.devices import HostDevice
from pipeloom.devices.communicators import COMMUNICATORS, Communicators
from pipeloom.parallel import mesh, mesh_groups
from pipeloom.train import process_group
from pipeloom.transport import Channel, Lane, torch_distributed
from pipeloom.transport.torch_distributed import TorchDistributedTransport
from tests.cpu.ranks import run_ranks
from tests.cpu.train_runs import local, text  # noqa: F401  # a fixture

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


class _Gpu(HostDevice):
    """A device with some free memory, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 1000 * MIB

    def free_bytes(self) -> int:
        return self.free


class _Group:
    """As much of a process group as a channel asks for; it notes in `calls` what is asked."""

    def __init__(self, calls: list[tuple[str, Any]], name: Any, gpu: _Gpu, takes: tuple[int, int] = (30, 4)) -> None:
        self._calls, self._name, self._gpu, self._takes = calls, name, gpu, takes

    def _get_backend(self, device: torch.device) -> _Group:
        assert device == self._gpu.device
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._note("connect")
        self._gpu.free -= self._takes[0] * MIB

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimpleNamespace:
        return self._exchanged("send", tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SimpleNamespace:
        if tensors[0].numel() > 1:
            raise RuntimeError("connection closed")  # ends the thread that listens for envelopes
        return self._exchanged("receive", tensors)

    def abort(self) -> None:
        """There is nothing to end."""

    def _exchanged(self, what: str, tensors: list[Tensor]) -> SimpleNamespace:
        if tensors[0].numel() == 1:
            self._note(what)
            self._gpu.free -= self._takes[1] * MIB
        return SimpleNamespace(wait=lambda *_: None, is_completed=lambda: True)

    def _note(self, what: str) -> None:
        self._calls.append((what, self._name))


def test_a_communicator_is_made_once_and_its_memory_counts_until_its_group_is_gone() -> None:
    gpu, made, calls = _Gpu(), Communicators(), []
    first, second = (_Group(calls, name, gpu) for name in "ab")
    assert (made.number, made.num_bytes) == (0, 0)
    for group in (first, second, first):
        made.connect(group, gpu, lambda element, group=group: group.send([element], 1, 0))  # type: ignore[arg-type]
    assert calls == [("connect", "a"), ("send", "a"), ("connect", "b"), ("send", "b")]
    assert (made.number, made.num_bytes) == (2, 68 * MIB)
    del first, group
    assert (made.number, made.num_bytes) == (1, 34 * MIB)


def _opened(
    monkeypatch: pytest.MonkeyPatch, process: int, replicas: list[list[int]], channels: list[Channel]
) -> tuple[list[tuple[str, Any]], int]:
    """What a process asks of the NCCL groups of its channels, in order, and how many communicators it has then."""
    calls: list[tuple[str, Any]] = []
    gpu, numbers = _Gpu(), iter(range(1000))

    def new_group(members: list[int], timeout: object, backend: str) -> _Group | None:
        assert dist.group.WORLD.bound_device_id is None  # else all processes split its communicator
        name = (next(numbers), backend, *members)
        return _Group(calls, name, gpu) if process in members else None

    monkeypatch.setattr(dist, "get_rank", lambda group=None: process)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(torch_distributed, "destroy_groups", lambda groups: None)
    monkeypatch.setattr(torch_distributed, "device_of", lambda device: gpu)
    monkeypatch.setattr(distributed_c10d._world, "default_pg", SimpleNamespace(bound_device_id=CUDA))
    made = Communicators()
    monkeypatch.setattr(torch_distributed, "COMMUNICATORS", made)
    rank = next(replica.index(process) for replica in replicas if process in replica)
    transport = TorchDistributedTransport(rank, device=CUDA, replicas=replicas)
    transport.open(channels)
    found = made.number
    assert dist.group.WORLD.bound_device_id == CUDA
    transport.close()
    assert made.number == 0
    return calls, found


def _all_connect(orders: dict[int, list[tuple[int, ...]]]) -> bool:
    """Whether processes that each connect groups in an order, and wait for the other members, come to an end."""
    left = {process: list(order) for process, order in orders.items()}
    while any(left.values()):
        heads = [order[0] for order in left.values() if order]
        ready = [head for head in heads if all(left[member] and left[member][0] == head for member in head[2:])]
        if not ready:
            return False
        for member in ready[0][2:]:
            left[member].pop(0)
    return True


def test_channels_connect_before_the_first_message_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [[0, 2, 4, 6], [1, 3, 5, 7]]
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    channels = sorted(Channel(a, b, lane) for a, b in pairs for lane in (Lane.PIPELINE, Lane.RESULT))
    orders, directions = {}, []
    for process in range(8):
        calls, number = _opened(monkeypatch, process, replicas, channels)
        assert number == 12  # there and back, in two lanes, with three others
        assert [what for what, _ in calls[::2]] == ["connect"] * 12
        assert [name for _, name in calls[::2]] == [name for _, name in calls[1::2]]
        assert all(name[1] == "nccl" for _, name in calls)
        orders[process] = [name for _, name in calls[::2]]
        directions += [(name, what) for what, name in calls[1::2]]
    assert _all_connect(orders)
    assert len(set(directions)) == 2 * 24 * 2  # on each channel one member sends and the other receives
    turned = {process: order[::-1] if process == 0 else order for process, order in orders.items()}
    assert not _all_connect(turned)


def _of_a_mesh(rank: int) -> list[tuple[int, list[int]]]:
    """The groups of a mesh that connect, with the sum of ones over each. gloo stands for NCCL, and sums for it."""
    found: list[tuple[int, list[int]]] = []

    def connect(group: dist.ProcessGroup, device: HostDevice, first: Callable[[Tensor], object]) -> None:
        element = torch.ones(1, device=device.device)
        first(element)
        assert group.bound_device_id is None
        found.append((int(element), dist.get_process_group_ranks(group)))

    whole, make = dist.group.WORLD, mesh_groups.init_device_mesh
    assert whole is not None
    whole.bound_device_id = CUDA  # as of init_process_group(device_id=...)
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    mesh_groups.init_device_mesh = lambda device, *arguments, **more: make("cpu", *arguments, **more)
    pl.Mesh._own_device = lambda self: HostDevice()  # type: ignore[method-assign]
    COMMUNICATORS.connect = connect  # type: ignore[method-assign]
    with pl.Mesh(dp=2) as made:
        made.links("dp")
        made.axis("dp")
    assert whole.bound_device_id == CUDA
    return found


def test_groups_of_replicas_and_axes_connect() -> None:
    assert run_ranks(_of_a_mesh, 2) == [[(2, [0, 1])] * 2] * 2


@pytest.mark.parametrize(
    ("backend", "gpus", "connects"),
    [
        ("cpu:gloo,cuda:nccl", "ab", True),
        ("cpu:gloo,cuda:nccl", "aa", False),  # NCCL refuses them, and they may train on the CPU
        ("cpu:gloo,cuda:nccl", "a ", False),
        ("cpu:gloo,cuda:nccl", " a", False),
        ("gloo", "ab", False),
    ],
)
def test_groups_connect_where_every_process_has_a_gpu(
    backend: str, gpus: str, connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (gpu.strip() for gpu in gpus)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(own))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(mesh, "device_of", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(mesh, "sharing_of", lambda device: SimpleNamespace(identity=own))
    members = SimpleNamespace(gather=lambda payload: [payload, other.encode()])
    found = pl.Mesh._own_device(SimpleNamespace(members=members))  # type: ignore[arg-type]
    assert (found and found.device) == (CUDA if connects else None)


def test_a_run_says_how_many_communicators_it_has(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process_group, "COMMUNICATORS", SimpleNamespace(number=3, num_bytes=96 * MIB))
    local(text, tmp_path / "run", "--steps", "1", "--eval_steps", "0", "--sample_tokens", "0")
    said = "3 communicators in 96 MiB of device memory (rank 0)"
    assert f"NCCL: {said}, which memory forecasts and peaks do not count" in capfd.readouterr().out
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["NCCL"] == said


def test_the_process_with_most_memory_is_named() -> None:
    class Three(process_group.Group):
        def gather_json(self, value: object) -> list[list[int]]:
            return [[0, 0], [2 * MIB, 1], [MIB, 2]]

    group = Three(0, 3, torch.device("cpu"))
    assert group.communicators() == "1 communicator in 2 MiB of device memory (rank 1)"
    assert process_group.Group(0, 1, torch.device("cpu")).communicators() is None
