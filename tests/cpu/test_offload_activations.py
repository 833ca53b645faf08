"""Activations in a file between forward and backward: the same numbers, fewer bytes in memory."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, RunError
from pipeloom.ir import Op
from pipeloom.parallel.offload import activations
from pipeloom.parallel.options import OffloadActivations
from tests.cpu.pairwise import of_grid
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, make_mlp, tokens

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"num_chunks": 2},
    "zb-h1": {"num_ranks": 3},
    "zb-v": {},
    "seq1f1b": {"num_slices": 3},
}


def _train(name: str, offload: OffloadActivations | None, recompute: str = "none", transport="loopback", **sizes):
    """Losses of two steps, the gradients after both, and the bytes that went away and came back."""
    schedule = pl.schedules.build(name, **{"num_ranks": 2, "num_microbatches": 6, **sizes})
    torch.manual_seed(3)
    model = make_gpt(tied=True)
    options = {"recompute": recompute, "offload": offload, "transport": transport}
    with pl.Pipeline(model, schedule, loss_fn=language_loss, **options) as pipe:
        losses = []
        for step in range(2):
            losses.append(pipe.step(*tokens(12, seed=step)))
            predicted = pl.check(pipe.program).live_activations
            assert pipe.memory.peak_live_activations == {rank: predicted[rank] for rank in pipe.executor.local_ranks}
            assert set(pipe.memory.live_activations.values()) == {0}
            losses.append(pipe.evaluate(*tokens(12, seed=step)))
        return losses, {name: p.grad for name, p in pipe.named_parameters()}, pipe.memory.offload_traffic.moved_bytes


@cache
def _expected(name: str):
    return _train(name, None, **SCHEDULES[name])


@pytest.mark.parametrize(
    ("name", "recompute", "beside"),
    of_grid(SCHEDULES, ("none", "selective", "full"), (0, 1), apart={(0, 1)}),  # stages recompute in any schedule alike
    ids=str,
)
def test_gradients_are_bitwise_those_without(name: str, recompute: str, beside: int, tmp_path: Path) -> None:
    expected = _expected(name)
    offload = OffloadActivations(f"disk:{tmp_path}", beside=beside, least_bytes=64)
    losses, gradients, moved = _train(name, offload, recompute, **SCHEDULES[name])
    assert moved > 0 or beside == 1  # with few in flight no move fits beside a computation
    assert all(torch.equal(a, b) for a, b in zip(losses, expected[0], strict=True))
    assert all(torch.equal(gradients[key], value) for key, value in expected[1].items())
    assert not list(tmp_path.iterdir())


def _rank(rank: int, directory: str):
    losses, gradients, _ = _train("zb-v", OffloadActivations(f"disk:{directory}", least_bytes=64), transport="torch")
    return [loss.item() for loss in losses], {name: gradient.numpy() for name, gradient in gradients.items()}


def test_in_processes(tmp_path: Path) -> None:
    expected_losses, expected, _ = _train("zb-v", None)
    for losses, gradients in run_ranks(_rank, 2, str(tmp_path)):
        assert losses == [loss.item() for loss in expected_losses]
        for name, gradient in gradients.items():
            assert (gradient == expected[name].numpy()).all()


def _kept_bytes(pipe: pl.Pipeline, batch: tuple[Tensor, Tensor]) -> int:
    """The most bytes of noted storages that there were behind a forward or a finished move of one step."""
    worker, peaks = pipe.executor.workers[0], []
    bound = worker.bind(pipe.program)
    pipe.executor._bound[pipe.program.num_microbatches, False] = {0: bound}

    def held() -> int:
        for entry in worker.state.wiring.mover._entries.values():
            if entry.written is not None:
                entry.written.result()
        pieces = [thing for thing in gc.get_objects() if type(thing) is activations._Piece]
        return sum({p.storage._cdata: p.num_bytes for p in pieces if p.storage is not None}.values())

    for instruction in bound.instructions:

        def run(run=instruction.run, op=instruction.action.op) -> None:
            run()
            if op in (Op.F, Op.OFFLOAD):
                peaks.append(held())

        object.__setattr__(instruction, "run", run)
    pipe.step(*batch)  # whose forwards get copies of their inputs, to see whether they change them
    threads = worker.state.wiring.mover._mover
    for done in (threads.read(int), threads.write(int)):
        done.result()  # a thread has what it moved last until it gets something else
    peaks.clear()
    pipe.step(*batch)
    return max(peaks)


@pytest.mark.usefixtures("new_objects_alone")
def test_what_is_held_falls_to_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight micro-batches so many are in memory at once as may be."""
    everything = frozenset((0, b, None) for b in range(8))
    monkeypatch.setattr("pipeloom.engine.worker.moved_keys", lambda program, rank: everything)  # all are noted
    schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=8)
    peaks = {}
    for most in (2, 4, 7):
        offload = OffloadActivations(f"disk:{tmp_path}", most=most, beside=0, least_bytes=1)
        with pl.Pipeline(
            make_mlp(width=32), schedule, loss_fn=F.mse_loss, offload=offload, transport="loopback"
        ) as pipe:
            x = torch.randn(80, 32)
            peaks[most] = _kept_bytes(pipe, (x, x))
    one = 10 * 32 * 4 * 6  # samples, width, bytes, results of layers
    assert peaks[4] - peaks[2] == 2 * one
    assert peaks[7] - peaks[4] == 3 * one


def test_words_and_caps_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    where = f"disk:{tmp_path}"
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    stream = pl.schedules.build("pipedream", num_ranks=2, num_microbatches=4, microbatches_per_update=1)

    def make(schedule, *options, **named):
        offload = OffloadActivations(*options, **named)
        return pl.Pipeline(make_mlp(), schedule, loss_fn=F.mse_loss, offload=offload, transport="loopback")

    for refused, words in (
        (lambda: make(schedule, "cpu"), "offload='cpu'.*in host memory already"),
        (lambda: make(schedule, "disk:/no/such/place"), "No such file"),
        (lambda: make(schedule, where, most=0.5), "Raise the cap"),
        (lambda: make(stream, where), "needs a synchronous schedule.*1f1b"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_ends_a_step_in_one_line_and_leaves_the_pipeline_clean(tmp_path, monkeypatch) -> None:
    schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=4)
    offload = OffloadActivations(f"disk:{tmp_path}", least_bytes=1)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    x = torch.randn(8, 8)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=F.mse_loss, offload=offload, transport="loopback") as pipe:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            RunError, match=r"rank 0, stage 0, action 0OFFLOAD1, micro-batch 1: .*no space.*No space left"
        ) as caught:
            pipe.step(x, x)
        assert "\n" not in str(caught.value)
        assert set(pipe.memory.live_activations.values()) == {0}


class _WritesIntoItsResult(torch.nn.Module):
    """exp keeps its result for the backward; `late` writes into it when a later layer runs."""

    def __init__(self, shared: list[Tensor], late: bool) -> None:
        super().__init__()
        self.line, self.shared, self.late = torch.nn.Linear(64, 64), shared, late

    def forward(self, x: Tensor) -> Tensor:
        if self.late and self.training:
            with torch.no_grad():
                self.shared.pop().mul_(2.0)
            return self.line(x)
        result = self.line(x).exp()
        self.shared.append(result)
        return result * 1.0


@pytest.mark.parametrize("least_bytes", [64, 1 << 20], ids=["moved", "left"])
def test_a_saved_result_that_is_written_into_is_noticed_as_without_offload(tmp_path: Path, least_bytes: int) -> None:
    said = []
    for offload in (None, OffloadActivations(f"disk:{tmp_path}", beside=0, least_bytes=least_bytes)):
        shared: list[Tensor] = []
        model = torch.nn.Sequential(*(_WritesIntoItsResult(shared, late) for late in (False, True, False, True)))
        schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=4)
        with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, offload=offload) as pipe:
            with pytest.raises(RunError, match=r"by an inplace operation.*at version 1; expected version 0") as it:
                pipe.step(torch.ones(8, 64), torch.ones(8, 64))
            said.append(str(it.value))
    assert "stage 1" in said[0]
