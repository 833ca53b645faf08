"""Messages with tensors on a device: streams wait for each other, hosts for no stream; which process has which GPU."""

from __future__ import annotations

import json
import re
import select
import socket
from types import SimpleNamespace

import pytest
import torch

from pipeloom.devices.device import Stream
from pipeloom.errors import InputError, PeerLost, RunError
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.processes.launcher import membership
from pipeloom.train.process_group import device_of_process
from pipeloom.transport import Channel, Lane, SharedMemoryTransport, device_places
from pipeloom.transport.device_block import DeviceBlock
from pipeloom.transport.shared_channel import SharedIncoming, SharedOutgoing
from pipeloom.transport.values import flatten, unflatten
from tests.cpu.lazy_device import FlaggedSharing, LazySharing
from tests.cpu.ranks import run_ranks


def _ends() -> tuple[SharedOutgoing, SharedIncoming, LazySharing, LazySharing]:
    """Both ends of a channel, in this process, each with a device of its own that runs nothing by itself."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = LazySharing(), LazySharing()
    channel = Channel(0, 1, Lane.PIPELINE)
    waiting = SimpleNamespace(
        spin_seconds=0.0, timeout_seconds=10.0, processes=(0, 1), sharing=receiver, flush=lambda: True
    )
    return SharedOutgoing(one, channel, set(), sender), SharedIncoming(other, channel, waiting), sender, receiver


def _computed(sharing: LazySharing, value: float, length: int = 5) -> torch.Tensor:
    """A tensor on the device, which is not computed before something waits for it."""
    result, target = torch.full((length,), value, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)

    def compute() -> None:
        target.copy_(result)

    sharing.device.queue.append(compute)
    return target


def test_a_receiver_has_the_values_that_were_computed() -> None:
    outgoing, incoming, sender, receiver = _ends()
    sent = {"device": _computed(sender, 3.0), "host": torch.arange(4), "none": torch.zeros(0, dtype=torch.float64)}
    outgoing.send(*flatten(sent))
    assert sender.device.used == [(Stream.OUTGOING, sent["device"].data_ptr()), (Stream.OUTGOING, 0)]
    message = incoming.receive()
    found = unflatten(message.layout, message.tensors)
    assert torch.equal(found["host"], torch.arange(4))
    assert found["none"].shape == (0,)
    assert (found["device"] == -1).all(), "the host has waited for a stream"
    assert ("compute", found["device"].data_ptr()) in receiver.device.used
    receiver.device.mark().reach()  # nothing else runs by itself
    assert (found["device"] == 3.0).all()


def test_a_block_is_overwritten_after_the_receiver_has_copied_it() -> None:
    outgoing, incoming, sender, receiver = _ends()
    messages = []
    for value in range(4):
        outgoing.send(*flatten(_computed(sender, float(value))))
        messages.append(incoming.receive())
    assert len(outgoing._blocks) == 1
    sender.device.synchronize()  # first: it waits for the copies of the receiver
    for value, message in enumerate(messages):
        receiver.device.synchronize()
        assert (message.tensors[0] == float(value)).all()


def test_messages_that_are_not_read_have_blocks_of_their_own() -> None:
    outgoing, incoming, sender, receiver = _ends()
    sent = [_computed(sender, float(value), length=1 + value) for value in range(3)]
    for value in sent:
        outgoing.send(*flatten(value))
    outgoing.send(*flatten(torch.ones(3)))
    blocks = outgoing._blocks
    assert [isinstance(block, DeviceBlock) for block in blocks] == [True, True, True, False]
    for value in range(3):
        message = incoming.receive()
        receiver.device.synchronize()
        assert message.tensors[0].tolist() == [float(value)] * (1 + value)
    assert torch.equal(incoming.receive().tensors[0], torch.ones(3))


def test_a_small_message_leaves_a_large_block_to_others() -> None:
    outgoing, incoming, _, _ = _ends()
    small, large = torch.ones(1 << 12), torch.ones(1 << 18)
    for value in (small, large):
        outgoing.send(*flatten(value))
        incoming.receive()
    for value in (small, small, large):  # the second is sent while the block of the first is not free
        outgoing.send(*flatten(value))
    assert sorted(block.capacity for block in outgoing._blocks) == [small.nbytes, small.nbytes, large.nbytes]


def test_blocks_are_dropped_after_the_device_has_read_them() -> None:
    outgoing, incoming, sender, receiver = _ends()
    for _ in range(2):
        outgoing.send(*flatten(_computed(sender, 1.0)))
    for _ in range(2):
        incoming.receive()
    outgoing.end_step()
    outgoing.send(*flatten(_computed(sender, 1.0)))
    outgoing.end_step()
    assert len(outgoing._blocks) == 2  # the receiver's device has not copied them yet
    incoming.receive()
    receiver.device.synchronize()
    outgoing.send(*flatten(_computed(sender, 1.0)))
    outgoing.end_step()
    assert len(outgoing._blocks) == 1
    incoming.receive()
    outgoing.send(*flatten(_computed(sender, 1.0)))
    incoming.receive()
    assert len(incoming._blocks) == 1


def test_what_a_device_still_reads_stays_after_the_end() -> None:
    outgoing, incoming, sender, receiver = _ends()
    outgoing.send(*flatten(_computed(sender, 1.0)))
    message = incoming.receive()
    outgoing.discard()
    incoming.discard()
    for sharing in (sender, receiver):
        sharing.finish(0.0)
        assert len(sharing._retired) == 1
    receiver.device.synchronize()
    for sharing in (sender, receiver):
        sharing.finish(0.0)
        assert not sharing._retired
    assert (message.tensors[0] == 1.0).all()


def test_a_receiver_that_has_ended_is_not_waited_for() -> None:
    outgoing, incoming, sender, _ = _ends()
    outgoing.send(*flatten(_computed(sender, 1.0)))
    incoming._socket.close()
    outgoing.discard()
    assert len(sender._abandoned) == 1
    sender.finish(1e9)


_VALUES = [
    torch.arange(6, dtype=torch.float64),
    (torch.randn(4, 4, dtype=torch.float64).t(), torch.arange(3), {"text": "x", "loss": torch.tensor(1.5)}),
    torch.randn(3),
    torch.zeros(0, 4, dtype=torch.float64),
    (torch.zeros(0, dtype=torch.float64), torch.randn(3)),
    {f"a rather long name, number {n}": torch.full((n % 5,), n, dtype=torch.float64) for n in range(900)},
    torch.randn(100_000, dtype=torch.float64),
    "text",
]


def _exchange(rank: int) -> None:
    torch.manual_seed(0)
    sharing = FlaggedSharing()
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=60, sharing=sharing)
    there, back = Channel(0, 1, Lane.PIPELINE), Channel(1, 0, Lane.RESULT)
    transport.open([there, back])
    for _ in range(3):
        if rank == 0:
            for value in _VALUES:
                transport.outgoing(there).send(*flatten(value))
            for value in _VALUES:
                message = transport.incoming(back).receive()
                layout, tensors = flatten(value)
                assert message.layout == layout
                assert all(map(torch.equal, message.tensors, tensors))
        else:
            for _ in _VALUES:
                message = transport.incoming(there).receive()
                transport.outgoing(back).send(message.layout, message.tensors)
        transport.end_step()
        all_gather_bytes(b"")
    assert sharing.num_made <= len(_VALUES)  # blocks of the first step serve the others
    transport.close()


def test_values_on_devices_and_hosts_go_there_and_back() -> None:
    run_ranks(_exchange, 2)


def _leaves_early(rank: int) -> None:
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=60, sharing=FlaggedSharing())
    channel = Channel(0, 1, Lane.PIPELINE)
    transport.open([channel])
    if rank == 0:
        transport.outgoing(channel).send(*flatten(torch.ones(3, dtype=torch.float64)))
        (block,) = transport.outgoing(channel)._blocks
        transport.close()
        assert block.free  # the receiver has taken the message: nothing needs this process
    else:
        poll = select.poll()
        poll.register(transport.incoming(channel)._socket, select.POLLHUP)
        assert poll.poll(30_000)  # the sender has closed
        assert torch.equal(transport.incoming(channel).receive().tensors[0], torch.ones(3, dtype=torch.float64))
        with pytest.raises(PeerLost, match="rank 0 ended while rank 1 waited for it"):
            transport.incoming(channel).receive()
        transport.close()


def _sharing_on(monkeypatch: pytest.MonkeyPatch, *others: list[str], problem: str = "") -> SimpleNamespace:
    """This process is on a GPU "flagged"; `others` say where the others are: host, GPU, problem."""

    class Sharing(FlaggedSharing):
        def check(self) -> None:
            if problem:
                raise RunError(problem)

    monkeypatch.setattr(device_places, "sharing_of", lambda device: Sharing())
    return SimpleNamespace(gather=lambda own, **_: [own, *(json.dumps(each).encode() for each in others)])


def test_devices_of_processes_are_compared_before_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu, here = torch.device("cuda", 0), torch.device("cpu"), device_places.host_identity()

    def check(name: str, device: torch.device, members, replicas=((0, 1),)):
        return device_places.check_devices(name, device, replicas, members)

    same, other = [here, "flagged", ""], [here, "another", ""]
    assert isinstance(check("auto", cuda, _sharing_on(monkeypatch, same)), FlaggedSharing)
    assert isinstance(check("torch", cuda, _sharing_on(monkeypatch, other)), FlaggedSharing)
    assert check("auto", cpu, _sharing_on(monkeypatch, [here, "", ""])) is None
    for name, device, found, refusal in (
        ("torch", cuda, same, "ranks 0, 1 share a GPU, and NCCL needs a GPU per process. Use transport='cuda-ipc'."),
        ("shared-memory", cuda, same, "the model is on cuda:0. Use transport='cuda-ipc'"),
        ("cuda-ipc", cpu, [here, "", ""], "the model is on cpu. Move it with"),
        ("auto", cpu, same, "processes 1 hold their stages on a CUDA device and processes 0 on the CPU"),
    ):
        with pytest.raises(InputError, match=re.escape(refusal)):
            check(name, device, _sharing_on(monkeypatch, found))
    with pytest.raises(InputError, match="ranks 0, 1 share a GPU"):  # those of another replica
        check("torch", cuda, _sharing_on(monkeypatch, other, ["x", "y", ""], ["x", "y", ""]), ((0, 1), (2, 3)))


def test_a_driver_that_shares_no_memory_leaves_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, here = torch.device("cuda", 0), device_places.host_identity()
    members = _sharing_on(monkeypatch, [here, "another", ""], problem="cuMemCreate failed")
    assert device_places.check_devices("auto", cuda, ((0, 1),), members) is None
    with pytest.raises(InputError, match="transport='cuda-ipc': cuMemCreate failed"):
        device_places.check_devices("cuda-ipc", cuda, ((0, 1),), members)
    members = _sharing_on(monkeypatch, [here, "flagged", ""], problem="cuMemCreate failed")
    with pytest.raises(InputError, match="Start one process per GPU: cuMemCreate failed"):
        device_places.check_devices("auto", cuda, ((0, 1),), members)


def test_a_sender_that_closes_waits_until_its_messages_are_taken() -> None:
    run_ranks(_leaves_early, 2)


def test_processes_are_dealt_out_to_the_gpus_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        membership({"RANK": str(8 + k), "LOCAL_RANK": str(k), "LOCAL_WORLD_SIZE": "5", "WORLD_SIZE": "13"})
        for k in range(5)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device_of_process(place) for place in (*places, None)] == [(torch.device("cpu"), 1)] * 6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [device_of_process(place) for place in (*places, None)]
    assert [device.index for device, _ in found] == [0, 1, 0, 1, 0, 0]
    assert [sharing for _, sharing in found] == [3, 2, 3, 2, 3, 1]
