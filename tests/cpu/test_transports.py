"""Channels: any value arrives as it was sent, in order; memory goes back; nothing stays behind."""

from __future__ import annotations

import gc
import os
import socket
from collections import OrderedDict, namedtuple
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost, StageError
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.transport import (
    Channel,
    HybridTransport,
    Lane,
    OneProcessTransport,
    Transport,
    shared_memory,
    torch_distributed,
)
from pipeloom.transport.loopback import LoopbackTransport
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.torch_distributed import TorchDistributedTransport, _wire_form
from pipeloom.transport.values import decode, flatten, join_batch, split_batch, unflatten
from tests.cpu.ranks import run_ranks

VALUES = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.zeros(0, 4),
    torch.randn(3, 5).t(),
    (torch.tensor([True, False]), torch.arange(3, dtype=torch.int64)),
    {"x": torch.randn(2, 2, dtype=torch.bfloat16), "mask": torch.ones(3, dtype=torch.bool), "n": 7, "none": None},
    [torch.randn(2, dtype=torch.complex64), (torch.arange(5, dtype=torch.uint8), {"k": [torch.randn(1)]})],
    (torch.randn(100_000), torch.randn(3)),
    (),
    None,
    torch.randn(40_000, dtype=torch.complex64).conj(),
    {f"a rather long name for number {index}": torch.full((index % 5,), index) for index in range(1500)},
    "text " * 20_000,
    {"only": "text", 3: 1.5, "flag": True},
]


def _same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_come_apart_and_together_again(value) -> None:
    layout, tensors = flatten(value)
    assert decode(layout.header) == layout
    assert _same(unflatten(decode(layout.header), tensors), value)


def test_constants_that_are_equal_stay_apart() -> None:
    values = [(1,), (True,), (1.0,), (0.0,), (-0.0,), (0,), ({1: 0},), ({True: 0},), ({1: False},), (float("nan"),)]
    for value in values:
        assert repr(unflatten(*flatten(value))) == repr(value)


def test_values_that_cannot_travel_are_refused() -> None:
    with pytest.raises(InputError, match=r"a stage returned a value of type set: .*list\(x\) or dict\(x\)"):
        flatten((torch.ones(1), {1, 2}))
    with pytest.raises(InputError, match=r"a stage returned a value of type torch\.sparse_coo tensor"):
        flatten([torch.eye(2).to_sparse()])
    with pytest.raises(InputError, match="a stage returned a value of type nested tensor"):
        flatten(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))


def test_subclasses_of_tuples_and_dicts_arrive_as_plain_ones() -> None:
    layout, tensors = flatten((namedtuple("Pair", "a b")(torch.ones(1), 2), OrderedDict(a=torch.ones(1))))
    pair, mapping = unflatten(layout, tensors)
    assert type(pair) is tuple
    assert pair == (torch.ones(1), 2)
    assert type(mapping) is dict
    assert mapping == {"a": torch.ones(1)}


def test_batches_are_cut_evenly_and_joined() -> None:
    value = {"tokens": torch.arange(18).reshape(9, 2), "weight": torch.randn(9), "name": "batch"}
    pieces, sizes = split_batch(value, 4, "inputs")
    assert sizes == [3, 2, 2, 2]
    assert _same(join_batch(pieces), value)
    with pytest.raises(InputError, match=r"tensors with 2, 9 samples along dimension 0.*x\.expand\(9, \.\.\.\)"):
        split_batch((torch.ones(9), torch.ones(2)), 2, "inputs")
    with pytest.raises(InputError, match="no tensor"):
        split_batch("text", 2, "inputs")


def _connect(kind: str, rank: int) -> Transport:
    if kind == "shared-memory":
        return SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=120)
    return TorchDistributedTransport(rank, device=torch.device("cpu"), timeout_seconds=120)


def _take(transport: Transport, channel: Channel):
    message = transport.incoming(channel).receive()
    return unflatten(message.layout, message.tensors)


def _exchange(rank: int, kind: str) -> None:
    transport = _connect(kind, rank)
    there, back = Channel(0, 1, Lane.PIPELINE), Channel(1, 0, Lane.PIPELINE)
    transport.open([there, back, Channel(0, 1, Lane.RESULT)])
    values = VALUES * 2
    if rank == 0:
        for value in values:
            transport.outgoing(there).send(*flatten(value))
        transport.outgoing(Channel(0, 1, Lane.RESULT)).send(*flatten(torch.tensor(1.0)))
        for value in values:
            assert _same(_take(transport, back), value)
    else:
        assert (
            transport.incoming(Channel(0, 1, Lane.RESULT)).receive().tensors[0] == 1.0
        )  # lanes do not wait for each other
        for _ in values:
            transport.outgoing(back).send(*flatten(_take(transport, there)))
    transport.end_step()
    all_gather_bytes(b"")
    transport.close()


@pytest.mark.parametrize("kind", ["shared-memory", "torch"])
def test_values_go_there_and_back(kind: str) -> None:
    run_ranks(_exchange, 2, kind)


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pipeloom")


def _memory_goes_back(rank: int) -> None:
    before = _maps()  # of the tests before
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=120)
    channel = Channel(0, 1, Lane.PIPELINE)
    transport.open([channel])

    def step(count: int, size: int, hold: bool) -> None:
        """`count` messages that the receiver keeps all at once, or drops one by one."""
        if rank == 0:
            for index in range(count):
                transport.outgoing(channel).send(*flatten(torch.full((size,), float(index))))
                if not hold:
                    all_gather_bytes(b"")
        else:
            kept = []
            for index in range(count):
                (tensor,) = transport.incoming(channel).receive().tensors
                assert bool((tensor == index).all())
                if hold:
                    kept.append(tensor)
                else:
                    del tensor
                    all_gather_bytes(b"")
            assert all(bool((tensor == index).all()) for index, tensor in enumerate(kept))
            del kept
        gc.collect()
        all_gather_bytes(b"")
        transport.end_step()

    step(16, 50_000, True)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert _maps() == before + 16  # sixteen messages alive at once need sixteen blocks
    step(16, 50_000, False)
    if rank == 0:
        assert _maps() == before + 1, "the block that the step needed is kept"
    step(16, 50_000, False)  # the receiver unmaps what it hears of with the next step's messages
    assert _maps() <= before + 2, "blocks that a step did not need are kept"
    for size in (10, 70_000, 20, 500_000):
        step(4, size, False)
    step(4, 10, False)
    assert _maps() <= before + 3
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # others may close theirs meanwhile
    transport.close()


def test_shared_memory_goes_back_when_it_is_not_needed() -> None:
    run_ranks(_memory_goes_back, 2)


@pytest.mark.parametrize(("module", "name"), [(os, "memfd_create"), (socket, "SOCK_SEQPACKET")])
def test_shared_memory_needs_both_memory_files_and_message_sockets(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    assert shared_memory.available()
    monkeypatch.delattr(module, name)
    assert not shared_memory.available()


def _closes_before_its_peer(rank: int) -> list[bool]:
    ways: list[bool] = []
    torch_distributed._CLOSING_SECONDS = 0.2
    torch_distributed._PeerGroup.close = lambda _, *, orderly: ways.append(orderly)
    transport = TorchDistributedTransport(rank, device=torch.device("cpu"), timeout_seconds=120)
    transport.open([Channel(0, 1, Lane.PIPELINE), Channel(1, 0, Lane.PIPELINE)])
    if rank == 0:
        transport.close()
    all_gather_bytes(b"")
    transport.close()
    return ways


def test_groups_are_aborted_where_the_peer_still_sends() -> None:
    """NCCL would wait for it."""
    early, late = run_ranks(_closes_before_its_peer, 2)
    assert early
    assert not any(early)
    assert late
    assert all(late)


def test_only_tensors_of_the_host_travel_as_bytes() -> None:
    """NCCL sends by type, where gloo does not know all types; `meta` stands for any other device."""
    there, here = (torch.zeros(2, 3, dtype=torch.bfloat16, device=device) for device in ("meta", "cpu"))
    assert (_wire_form(there).dtype, _wire_form(there).shape) == (torch.bfloat16, (2, 3))
    assert (_wire_form(here).dtype, _wire_form(here).shape) == (torch.uint8, (12,))


def test_a_transport_without_channels_closes_its_socket() -> None:
    before = len(os.listdir("/proc/self/fd"))
    transport = SharedMemoryTransport(0, lambda hello: [hello])
    transport.open([])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for _ in range(2):
        transport.close()
        assert len(os.listdir("/proc/self/fd")) == before


def _sends_to_an_ended_rank(rank: int) -> None:
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=120)
    channel = Channel(0, 1, Lane.PIPELINE)
    transport.open([channel])
    if rank == 1:
        transport.close()
    all_gather_bytes(b"")
    if rank == 0:
        transport.outgoing(channel).send(*flatten(torch.zeros(3)))
        with pytest.raises(PeerLost, match="rank 1 ended before it had taken what this rank sent"):
            transport.end_step()
        transport.close()


def test_a_step_fails_whose_messages_nobody_can_take() -> None:
    run_ranks(_sends_to_an_ended_rank, 2)


def _times_out(rank: int, kind: str) -> None:
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=120)
    channel = Channel(0, 1, Lane.PIPELINE)
    transport.open([channel])
    transport.timeout_seconds = 0.2  # from now on: until here the other rank may come as late as it likes
    if rank == 1:
        assert not transport.incoming(channel).ready()
        with pytest.raises(PeerLost, match=r"rank 1 waited 0\.2 s for rank 0"):
            transport.incoming(channel).receive()
    all_gather_bytes(b"")
    transport.close()


def test_a_silent_peer_is_reported_after_the_timeout() -> None:
    run_ranks(_times_out, 2, "shared-memory")


def _waits_in_a_second_replica(process: int, kind: str) -> None:
    replicas, rank = ((0, 1), (2, 3)), process % 2
    mine, channel = replicas[process // 2], Channel(1, 0, Lane.PIPELINE)
    transport: SharedMemoryTransport | TorchDistributedTransport
    if kind == "shared-memory":
        transport = SharedMemoryTransport(rank, all_gather_bytes, processes=mine, timeout_seconds=120)
        transport.open([channel])
        transport.timeout_seconds = 0.2
    else:
        transport = TorchDistributedTransport(rank, device=torch.device("cpu"), replicas=replicas, timeout_seconds=0.2)
        transport.open([channel])
    if process == 2:
        with pytest.raises(PeerLost, match=r"^rank 0 waited 0\.2 s for rank 1 \(global rank 3\)$"):
            transport.incoming(channel).receive()
    all_gather_bytes(b"")
    if kind == "shared-memory" and process == 2:
        transport.timeout_seconds = 120
        with pytest.raises(PeerLost, match=r"^rank 1 \(global rank 3\) ended while rank 0 waited for it$"):
            transport.incoming(channel).receive()
    transport.close()


@pytest.mark.parametrize("kind", ["shared-memory", "gloo"])
def test_a_peer_is_named_by_its_global_rank_too_where_that_is_another_number(kind: str) -> None:
    run_ranks(_waits_in_a_second_replica, 4, kind)


def test_loopback_hands_over_references() -> None:
    transport = LoopbackTransport()
    channel = Channel(0, 1, Lane.PIPELINE)
    transport.open([channel])
    tensor = torch.ones(3)
    assert not transport.incoming(channel).ready()
    transport.outgoing(channel).send(*flatten(tensor))
    assert transport.incoming(channel).ready()
    assert transport.incoming(channel).receive().tensors[0] is tensor


class CountingTransport(OneProcessTransport):
    """Passes everything to `inner`, as a transport of a user's own does."""

    def __init__(self, inner: OneProcessTransport) -> None:
        self.inner, self.blocking = inner, inner.blocking
        self.num_opened = 0
        self.is_closed = False

    def open(self, channels):
        channels = list(channels)
        self.num_opened += len(channels)
        self.inner.open(channels)

    def outgoing(self, channel):
        return self.inner.outgoing(channel)

    def incoming(self, channel):
        return self.inner.incoming(channel)

    def interrupt(self, source):
        self.inner.interrupt(source)

    def end_step(self):
        self.inner.end_step()

    def close(self):
        self.is_closed = True
        self.inner.close()


@pytest.mark.parametrize("blocking", [False, True], ids=["one thread", "a thread per rank"])
def test_a_transport_inside_one_process_can_be_wrapped(blocking: bool) -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    inputs, targets = torch.randn(8, 3), torch.randn(8, 3)
    losses = []
    for transport in ("loopback", CountingTransport(LoopbackTransport(blocking=blocking))):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        with pl.Pipeline(model, schedule, loss_fn=torch.nn.functional.mse_loss, transport=transport) as pipe:
            losses.append(pipe.step(inputs, targets))
    assert torch.equal(*losses)
    assert transport.num_opened
    assert transport.is_closed


def test_a_rank_that_fails_under_a_wrapped_transport_stops_the_others() -> None:
    def fails(output, target):
        raise ValueError("no loss")

    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    transport = CountingTransport(LoopbackTransport(blocking=True))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with (
        pl.Pipeline(model, schedule, loss_fn=fails, transport=transport) as pipe,
        pytest.raises(StageError, match="no loss"),
    ):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3))


def test_ranks_that_are_threads_of_a_transport_do_not_recompute() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    transport = CountingTransport(LoopbackTransport(blocking=True))
    with pytest.raises(InputError, match="recompute='full' does not work with ranks that are threads"):
        pl.Pipeline(model, schedule, recompute="full", transport=transport)


def test_a_transport_between_processes_needs_a_process_group() -> None:
    transport = HybridTransport(LoopbackTransport(), LoopbackTransport(), lambda channel: True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    with pytest.raises(InputError, match=r"^transport=HybridTransport: it needs a process group"):
        pl.Pipeline(model, schedule, transport=transport)
