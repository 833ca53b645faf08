"""Real processes: every transport against the sequential reference, lost peers, and what is left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost, RunError, StageError
from pipeloom.transport import shared_memory
from pipeloom.transport.interface import Channel, Lane
from pipeloom.transport.values import flatten
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import accumulate, language_loss, make_gpt, make_mlp, tokens

mse = nn.functional.mse_loss
TRANSPORTS = ["shared-memory", "torch"]


def _batch(samples: int = 9, width: int = 8):
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, width, generator=generator) for _ in range(2))


def _gradients(rank: int, num_ranks: int, transport: str, cases: Sequence[tuple[str, int]]) -> None:
    inputs, targets = _batch()
    for name, num_microbatches in cases:
        reference = make_mlp()
        schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        with pl.Pipeline(make_mlp(), schedule, loss_fn=mse, transport=transport) as pipe:
            for _ in range(2):
                expected = accumulate(reference, mse, inputs, targets, num_microbatches)
                pipe.evaluate(inputs, targets)
                assert torch.equal(pipe.step(inputs, targets), expected)
            expected_gradients = dict(reference.named_parameters())
            for parameter_name, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, expected_gradients[parameter_name].grad), parameter_name
            assert pipe.memory.peak_live_activations[rank] == pl.check(schedule).live_activations[rank]
            assert pipe.memory.live_activations == {rank: 0}
            norm = pl.clip_grad_norm(pipe, 0.01)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
            output = pipe.forward(inputs if pipe.needs_inputs else None)
            assert (output is not None) == pipe.needs_targets
            if output is not None:
                torch.testing.assert_close(output, reference(inputs))


SYNCHRONOUS = list(itertools.product(("naive", "gpipe", "1f1b"), range(1, 10)))
FEW = [("naive", 4), ("gpipe", 1), ("gpipe", 9), ("1f1b", 4), ("1f1b", 9)]


@pytest.mark.parametrize("cases", fewer(FEW, SYNCHRONOUS), ids=["few", "all"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_in_processes(num_ranks: int, transport: str, cases: Sequence[tuple[str, int]]) -> None:
    run_ranks(_gradients, num_ranks, num_ranks, transport, cases)


def _train(rank: int, num_ranks: int, transport: str, tied: bool, num_steps: int) -> list[float]:
    """The losses of all steps. Untied: parameters and norms bitwise those of one process."""
    dtype = torch.float64 if tied else torch.float32
    reference = make_gpt(tied=tied, dtype=dtype)
    schedule = pl.schedules.one_f_one_b(num_ranks=num_ranks, num_microbatches=4)
    # Adam divides by the root of tiny squares, so it blows rounding up; sums of tied gradients differ by rounding.
    make_optimizer = torch.optim.SGD if tied else torch.optim.AdamW
    expected_optimizer = make_optimizer(reference.parameters(), lr=1e-2)
    losses = []
    with pl.Pipeline(make_gpt(tied=tied, dtype=dtype), schedule, loss_fn=language_loss, transport=transport) as pipe:
        optimizer = make_optimizer(pipe.parameters(), lr=1e-2)
        for step in range(num_steps):
            inputs, targets = tokens(6, length=12 - step % 3, seed=step)
            expected = accumulate(reference, language_loss, inputs, targets, 4)
            loss = pipe.step(inputs, targets)
            norm = pl.clip_grad_norm(pipe, 1.0)
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            if tied:
                torch.testing.assert_close((loss, norm), (expected, expected_norm), rtol=1e-12, atol=0)
            else:
                assert torch.equal(loss, expected)
                assert torch.equal(norm, expected_norm)
            for o in (optimizer, expected_optimizer):
                o.step()
                o.zero_grad()
            losses.append(loss.item())
        parameters = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            if tied:
                torch.testing.assert_close(parameter, parameters[name], rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(parameter, parameters[name])
    embedding = dict(pipe.named_parameters()).get("embedding.weight")
    return [losses, None if embedding is None else embedding.detach().tolist()]


@pytest.mark.parametrize("num_steps", fewer(6, 20))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tied", [False, True])
def test_steps_in_processes(transport: str, tied: bool, num_steps: int) -> None:
    answers = run_ranks(_train, 2, 2, transport, tied, num_steps)
    assert answers[0][0] == answers[1][0]  # every rank has the same losses
    if tied:  # both ranks hold the embedding, and it has not drifted apart by a bit
        assert answers[0][1] == answers[1][1]


def _two_machines(rank: int) -> None:
    """Ranks 0 and 1 on one machine, 2 and 3 on another: only the identity that hosts tell each other differs."""
    shared_memory.host_identity = lambda: f"host {rank // 2}"
    reference = make_gpt(tied=True, dtype=torch.float64)
    schedule = pl.schedules.one_f_one_b(num_ranks=4, num_microbatches=5)
    with pl.Pipeline(make_gpt(tied=True, dtype=torch.float64), schedule, loss_fn=language_loss) as pipe:
        for step in range(3):
            inputs, targets = tokens(7, length=12 - step, seed=step)
            expected = accumulate(reference, language_loss, inputs, targets, 5)
            torch.testing.assert_close(pipe.step(inputs, targets), expected, rtol=1e-12, atol=0)
        gradients = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-12, atol=1e-15)
        neighbours = {0: (False, True), 1: (True, False), 2: (False, True), 3: (True, False)}[rank]
        before, after = (
            pipe.executor.connection.transport._local.reaches(peer % 4, of=rank) for peer in (rank - 1, rank + 1)
        )
        assert (before, after) == neighbours


def test_shared_memory_within_and_torch_between_machines() -> None:
    run_ranks(_two_machines, 4)


def _out_of_step(rank: int, transport: str) -> str:
    inputs, targets = _batch(4)
    pipe = pl.Pipeline(
        make_mlp(), pl.schedules.gpipe(num_ranks=2, num_microbatches=2), loss_fn=mse, transport=transport
    )
    pipe.step(inputs, targets)
    with pytest.raises(RunError) as caught:
        (pipe.step if rank else pipe.evaluate)(inputs, targets)
    pipe.close()
    pipe.close()
    with pytest.raises(RunError, match="cannot run any more"):
        pipe.step(inputs, targets)
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_make_different_calls_are_told(transport: str) -> None:
    answers = run_ranks(_out_of_step, 2, transport)
    assert "rank 0 is in call 2 (evaluate or forward), this rank in call 2" in answers[1]


def _many_copies(rank: int, transport: str) -> None:
    """One stage on both ranks, with more parameters than fit into the head of a message."""
    model = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(800)])]
    for parameter in model[0].parameters():
        nn.init.zeros_(parameter)
    placement = pl.Placement(((0, 1),))
    orders = tuple(tuple(pl.Action(0, op, b) for op in (pl.Op.F, pl.Op.B)) for b in range(2))
    schedule = pl.Schedule(name="replicas", num_microbatches=2, placement=placement, orders=orders)
    with pl.Pipeline(
        model,
        schedule,
        loss_fn=lambda o, t: o.mean() * 0 + sum(p.sum() for p in model[0].parameters()),
        transport=transport,
    ) as pipe:
        pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        assert all(bool((p.grad == 1.0).all()) for p in pipe.parameters())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradient_sums_of_many_parameters(transport: str) -> None:
    run_ranks(_many_copies, 2, transport)


def _left_open(rank: int, transport: str) -> None:
    """A program that forgets to close: what it sent still arrives."""
    inputs, targets = _batch(32)
    pipe = pl.Pipeline(
        make_mlp(), pl.schedules.gpipe(num_ranks=2, num_microbatches=32), loss_fn=mse, transport=transport
    )
    for _ in range(2):
        pipe.step(inputs, targets)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pipeline_that_is_never_closed(transport: str) -> None:
    for _ in range(3):
        run_ranks(_left_open, 2, transport)


def _idle(rank: int) -> None:
    inputs, targets = _batch(4)
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=2)
    with ExitStack() as stack:
        settings = {"loss_fn": mse, "timeout_seconds": 3.0}
        pipes = [stack.enter_context(pl.Pipeline(make_mlp(), schedule, transport=t, **settings)) for t in TRANSPORTS]
        for pipe in pipes:
            pipe.step(inputs, targets)
        time.sleep(3.3)  # longer than a rank may wait: nobody is waiting
        for pipe in pipes:
            pipe.step(inputs, targets)


def test_the_timeout_counts_only_while_a_rank_waits() -> None:
    run_ranks(_idle, 2)


def _does_not_receive(rank: int, gate) -> None:
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=600)
    pipe = pl.Pipeline([_Dies(""), _Dies("")], schedule, loss_fn=mse, transport="shared-memory")
    # From now on: until here the other rank may come as late as it likes.
    pipe.executor.connection.transport.timeout_seconds = 0.5
    if rank == 0:
        transport = pipe.executor.connection.transport
        end = transport.outgoing(Channel(0, 1, Lane.PIPELINE))
        for _ in range(600):
            end.send(*flatten(torch.ones(1, 1)))
        with pytest.raises(PeerLost, match=r"rank 1 did not take all messages of rank 0 within"):
            transport.end_step()
        gate.set()
    else:
        assert gate.wait(240)


def test_a_peer_that_takes_nothing_is_reported_after_the_timeout() -> None:
    run_ranks(_does_not_receive, 2, multiprocessing.get_context("fork").Event())


class _Gate(nn.Module):
    """The first stage opens the gate at its last forward; the last stage computes nothing before that."""

    def __init__(self, gate, opens_after: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.gate, self.left = gate, opens_after

    def forward(self, x):
        if self.left is None:
            assert self.gate.wait(240), "the first stage could not go on while this one was computing"
        else:
            self.left -= 1
            if self.left == 0:
                self.gate.set()
        return x * self.weight


def _sends_do_not_wait(rank: int, transport: str, gate) -> None:
    model = [_Gate(gate, 8), _Gate(gate, None)]
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=8)
    with pl.Pipeline(model, schedule, loss_fn=mse, transport=transport) as pipe:
        batch = torch.ones(8, 1 << 18)  # a megabyte a micro-batch: more than a socket takes
        assert pipe.step(batch, torch.zeros_like(batch)).item() == 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sends_do_not_wait_for_a_receiver_that_computes(transport: str) -> None:
    gate = multiprocessing.get_context("fork").Event()
    run_ranks(_sends_do_not_wait, 2, transport, gate)


def _many_small_messages(rank: int, gate) -> None:
    """More messages than a socket holds, none of them received before the last is sent."""
    model = [_Gate(gate, 700), _Gate(gate, None)]
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=700)
    with pl.Pipeline(model, schedule, loss_fn=mse, transport="shared-memory") as pipe:
        batch = torch.ones(700, 1)
        assert abs(pipe.step(batch, torch.zeros_like(batch)).item() - 1.0) < 1e-4


def test_a_full_socket_does_not_block_the_sender() -> None:
    run_ranks(_many_small_messages, 2, multiprocessing.get_context("fork").Event())


class _Dies(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.how = how

    def forward(self, x):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise ZeroDivisionError("the user's own fault")
        return x * self.weight


def _neighbour_fails(rank: int, transport: str, how: str, writers) -> None:
    model = [_Dies(""), _Dies(""), _Dies(how)]
    schedule = pl.schedules.one_f_one_b(num_ranks=3, num_microbatches=4)
    pipe = pl.Pipeline(model, schedule, loss_fn=mse, transport=transport)
    batch = torch.ones(4, 3)
    try:
        pipe.step(batch, batch)
    except (PeerLost, StageError) as error:
        writers[rank].send(f"{type(error).__name__}: {error}")
        with pytest.raises(RunError, match="Make a new one"):
            pipe.step(batch, batch)
    os._exit(0)  # the group is broken; this test is about the message


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_lost_peer_is_named_by_everybody(how: str) -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(_neighbour_fails, 3, "shared-memory", how, [writer for _, writer in pipes])
    messages = [reader.recv() if reader.poll(1) else "" for reader, _ in pipes]
    if how == "raise":
        expected = "StageError: rank 2, stage 2, action 2F0, micro-batch 0: ZeroDivisionError: the user's own fault"
        assert messages[2] == expected
    assert "rank 1, stage 1, action 1RECV_B0, micro-batch 0: rank 2 ended" in messages[1]
    assert "rank 0, stage 0, action 0RECV_B0, micro-batch 0: rank 1 ended" in messages[0]
    assert all("\n" not in message for message in messages)


def _wrong_sizes(rank: int) -> None:
    model = make_mlp()
    with pytest.raises(InputError, match="schedule has 3 ranks and the process group 2 processes"):
        pl.Pipeline(model, pl.schedules.gpipe(num_ranks=3, num_microbatches=2), loss_fn=mse)
    with pl.Pipeline(model, pl.schedules.gpipe(num_ranks=2, num_microbatches=4), loss_fn=mse) as pipe:
        inputs, targets = _batch(3)
        with pytest.raises(InputError, match="3 samples for 4 micro-batches"):
            pipe.step(inputs, targets)
        inputs, targets = _batch(5)
        with pytest.raises(InputError, match="rank with the first stage"):
            pipe.step(None, targets)
        pipe.step(inputs, targets)  # a refused batch did not put the ranks out of step


def test_bad_batches_are_refused_before_communication() -> None:
    run_ranks(_wrong_sizes, 2)


_BENCHMARK = """
import tempfile, time
from benchmarks.common.processes import Crew
with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-"), Crew("ends", 1, int):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", _BENCHMARK], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(list(tmp_path.glob("pipeloom-benchmark-*"))) == 2
    process.send_signal(number)
    assert process.wait(timeout=300) != 0
    process.stdout.close()
    assert not list(tmp_path.glob("pipeloom-benchmark-*"))
