"""Processes that share one GPU: messages between them, and pipelines against one process."""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.devices import device_of, sharing_of
from pipeloom.devices.device import Stream
from pipeloom.errors import InputError, PeerLost, RunError, StageError
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.transport import Channel, Lane, SharedMemoryTransport
from pipeloom.transport.device_block import DeviceBlock
from pipeloom.transport.values import Value, flatten, unflatten
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens

DEVICE = "cuda:0"
_MOST_SECONDS = 60.0  # of a test
_SLEEP_CYCLES = 1_000_000_000  # about 0.5 s


def _run(function: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    run_ranks(_watched, num_ranks, function, *arguments, timeout_seconds=_MOST_SECONDS + 10)


def _watched(rank: int, function: Callable[..., None], *arguments: Any) -> None:
    """A rank that hangs prints its stack and ends."""
    faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
    torch.cuda.set_device(DEVICE)
    function(rank, *arguments)
    faulthandler.cancel_dump_traceback_later()


# --- messages -------------------------------------------------------------------------------------------------------


def _connected(rank: int) -> tuple[SharedMemoryTransport, Channel, Channel]:
    sharing = sharing_of(torch.device(DEVICE))
    transport = SharedMemoryTransport(rank, all_gather_bytes, timeout_seconds=60, sharing=sharing)
    there, back = Channel(0, 1, Lane.PIPELINE), Channel(1, 0, Lane.RESULT)
    transport.open([there, back])
    return transport, there, back


def _values(seed: int) -> list[Value]:
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=draw).to(dtype)

    return [
        normal(16 << 20),  # 64 MB
        normal(3, 5).t(),
        (normal(7, dtype=torch.bfloat16), torch.arange(4), {"loss": torch.tensor(1.5), "text": "x"}),
        normal(0, 4),
        (normal(0), torch.arange(3)),
        torch.arange(5),
        normal(1000, dtype=torch.float64),
        [torch.tensor([True, False], device=DEVICE), normal(2, 2, dtype=torch.float16), (normal(1),)],
        {f"a rather long name for number {n}": torch.full((n % 5,), n, device=DEVICE) for n in range(900)},
        *(normal(1 << 16, n) for n in range(1, 5)),
    ]


def _same(a: Value, b: Value) -> bool:
    (one, tensors), (other, others) = flatten(a), flatten(b)
    return one == other and all(
        x.device == y.device and torch.equal(x, y) for x, y in zip(tensors, others, strict=True)
    )


def _exchange(rank: int) -> None:
    """Values go there and back three times; the sender frees them, and uses their memory, at once."""
    transport, there, back = _connected(rank)
    for turn in range(3):
        if rank == 0:
            for value in _values(turn):
                transport.outgoing(there).send(*flatten(value))
            value = None
            noise = [torch.full((4 << 20,), float("nan"), device=DEVICE) for _ in range(8)]
            for value in _values(turn):
                message = transport.incoming(back).receive()
                assert _same(unflatten(message.layout, message.tensors), value), (turn, message.layout.structure)
            del noise
        else:
            for _ in _values(turn):
                message = transport.incoming(there).receive()
                transport.outgoing(back).send(message.layout, message.tensors)
        transport.end_step()
        all_gather_bytes(b"")
    transport.close()


def _late(rank: int) -> None:
    """The sender computes its values late and the receiver copies them late; neither host waits for a device."""
    transport, there, back = _connected(rank)
    device = device_of(torch.device(DEVICE))
    outgoing, incoming = (transport.outgoing(there), None) if rank == 0 else (None, transport.incoming(there))
    number, length = 8, 1 << 18
    for turn in range(2):  # the first makes blocks and streams
        if outgoing is not None:
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
            for n in range(number):
                computed = torch.full((length,), float(n), device=DEVICE) * 2
                outgoing.send(*flatten(computed))
                computed = None
            assert not turn or not device.mark().query(), "the host has waited for the device"
            assert transport.incoming(back).receive().tensors[0].item() == number * turn
        else:
            with device.on(Stream.INCOMING):
                torch.cuda._sleep(_SLEEP_CYCLES)  # copies wait; blocks are free for the sender's host meanwhile
            found = [incoming.receive().tensors[0] for _ in range(number)]
            assert not turn or not device.mark().query(), "the host has waited for the device"
            for n, tensor in enumerate(found):
                assert bool((tensor == 2.0 * n).all()), (turn, n, tensor.unique())
            transport.outgoing(back).send(*flatten(torch.tensor(number * turn)))
        transport.end_step()
        all_gather_bytes(b"")
    transport.close()


def _blocks(rank: int) -> None:
    """Blocks of earlier steps serve later ones; those that a step does not need are unmapped on both sides."""
    transport, there, _ = _connected(rank)
    free = []
    for number in (6, 6, 1, 1):
        for n in range(number):
            if rank == 0:
                transport.outgoing(there).send(*flatten(torch.full((8 << 20,), float(n), device=DEVICE)))
            else:
                assert bool((transport.incoming(there).receive().tensors[0] == n).all())
        torch.cuda.synchronize()
        all_gather_bytes(b"")
        transport.end_step()
        end = transport.outgoing(there) if rank == 0 else transport.incoming(there)
        held = end._blocks if rank == 0 else end._blocks.values()
        free.append(sum(isinstance(block, DeviceBlock) for block in held))
    assert max(free) <= 6
    assert free[3] == 1, free
    transport.close()


def _messages(rank: int) -> None:
    _exchange(rank)
    _late(rank)
    _blocks(rank)


def test_messages() -> None:
    _run(_messages, 2)


# --- pipelines ------------------------------------------------------------------------------------------------------


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for x, y in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True):
        loss = language_loss(model(x), y) * (len(x) / len(inputs))
        loss.backward()
        total += loss.detach()
    return total


def _compare(rank: int, num_ranks: int, name: str, num_microbatches: int, tied: bool, transport: str) -> None:
    chunks = {} if name in ("1f1b", "zb-h1", "gpipe") else {"num_chunks": 2}
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **chunks)
    reference = make_gpt(tied=tied, layers=8, dtype=torch.float64).to(DEVICE)
    model = copy.deepcopy(reference)
    what = f"{name}, {num_ranks} ranks, tied {tied}"
    with pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport) as pipe:
        for step in range(3):  # gradients of all of them add up; lengths change
            inputs, targets = tokens(9, length=12 - step, seed=step)
            expected = _accumulate(reference, inputs.to(DEVICE), targets.to(DEVICE), num_microbatches)
            found = pipe.step(inputs, targets)
            torch.testing.assert_close(found.to(DEVICE), expected, rtol=1e-12, atol=0, msg=f"{what}, loss {step}")
        parameters = dict(reference.named_parameters())
        for parameter_name, parameter in pipe.named_parameters():
            expected = parameters[parameter_name].grad
            error = (parameter.grad - expected).abs().max() / expected.abs().max()
            assert error < 1e-12, f"{what}, {parameter_name}: {error}"
        assert pipe.memory.live_activations == {rank: 0}
        norm, expected_norm = pl.clip_grad_norm(pipe, 0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm.cpu(), expected_norm.cpu(), rtol=1e-12, atol=0)


def _pipelines(rank: int, num_ranks: int) -> None:
    if num_ranks == 2:
        model = make_gpt(layers=2).to(DEVICE)
        schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
        for transport, refusal in (("torch", "NCCL needs a GPU per process"), ("shared-memory", "cuda-ipc")):
            with pytest.raises(InputError, match=refusal):
                pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport)
        with pytest.raises(InputError, match="cuda-ipc"):
            pl.Pipeline(make_gpt(layers=2), schedule, loss_fn=language_loss, transport="cuda-ipc")
    names = ["1f1b", "interleaved", "zb-h1", "zb-v", *(["dualpipev"] if num_ranks == 2 else [])]
    for name in names:
        _compare(rank, num_ranks, name, 8, tied=False, transport="cuda-ipc")
    for name in ("1f1b", "zb-v"):
        _compare(rank, num_ranks, name, 8, tied=True, transport="auto")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pipelines_against_one_process(num_ranks: int) -> None:
    _run(_pipelines, num_ranks, num_ranks)


def _with_graphs(rank: int) -> list[float]:
    """Losses of six steps with updates; messages arrive in memory that recorded actions read."""
    schedule = pl.schedules.build("interleaved", num_ranks=2, num_microbatches=4)
    losses = []
    with pl.Pipeline(make_gpt(layers=4).to(DEVICE), schedule, loss_fn=language_loss, graphs=True) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(6):
            inputs, targets = tokens(8, seed=step)
            losses.append(float(pipe.step(inputs, targets)))
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(InputError, match="earlier ones had"):
            pipe.step(*tokens(8, length=7))
        assert torch.isfinite(pipe.step(inputs, targets))
    return losses


def test_graphs_of_ranks_in_processes() -> None:
    found = run_ranks(_with_graphs, 2, timeout_seconds=60)
    reference = make_gpt(layers=4).to(DEVICE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        inputs, targets = (value.to(DEVICE) for value in tokens(8, seed=step))
        losses.append(float(_accumulate(reference, inputs, targets, 4)))
        optimizer.step()
        optimizer.zero_grad()
    assert found[0] == found[1]
    assert found[0] == pytest.approx(losses, rel=1e-4)


def _replicas(rank: int) -> None:
    """Two replicas on one GPU: what gloo sums and gathers passes through the CPU."""
    inputs, targets = (value.to(DEVICE) for value in tokens(8))
    for strategy in ("ddp", "zero1", "zero2", "zero3", "parameter-server"):
        reference = make_gpt(layers=2, dtype=torch.float64).to(DEVICE)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            _accumulate(reference, inputs, targets, 4)
            optimizer.step()
            optimizer.zero_grad()
        with pl.Mesh(pp=1, dp=2) as mesh:
            schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
            model, data = make_gpt(layers=2, dtype=torch.float64).to(DEVICE), pl.DataParallel(strategy)
            with pl.Pipeline(model, schedule, loss_fn=language_loss, mesh=mesh, data=data) as pipe:
                own = torch.optim.SGD(pipe.parameters(), lr=0.1)
                half = slice(0, 4) if rank == 0 else slice(4, 8)
                for _ in range(2):
                    pipe.step(inputs[half], targets[half])
                    own.step()
                    own.zero_grad()
                loss = pipe.evaluate(inputs[half], targets[half])
        with torch.no_grad():
            expected = language_loss(reference(inputs), targets)
        torch.testing.assert_close(loss.to(DEVICE), expected, rtol=1e-12, atol=0, msg=strategy)


def test_replicas_on_one_gpu() -> None:
    _run(_replicas, 2)


# --- lost peers -----------------------------------------------------------------------------------------------------


class _Dies(nn.Module):
    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.dies, self.calls = dies, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.dies and self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * self.weight


def _neighbour_dies(rank: int, writer: Any) -> None:
    model = [_Dies(dies=False).to(DEVICE), _Dies(dies=True).to(DEVICE)]
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=8)
    pipe = pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, transport="cuda-ipc")
    batch = torch.ones(8, 3)
    try:
        pipe.step(batch, batch)
    except (PeerLost, StageError) as error:
        writer.send(f"{type(error).__name__}: {error}")
        with pytest.raises(RunError, match="Make a new one"):
            pipe.step(batch, batch)
    os._exit(0)  # the group is broken; this test is about the message


def test_a_lost_peer_is_named() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    with pytest.raises(AssertionError, match="ended without an answer"):
        _run(_neighbour_dies, 2, writer)
    message = reader.recv() if reader.poll(1) else ""
    assert "rank 0, stage 0" in message
    assert "rank 1 ended" in message
    assert "\n" not in message
