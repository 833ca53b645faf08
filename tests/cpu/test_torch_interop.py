"""Schedules go to torch.distributed.pipelining and come back: its seven run here, ours run in its runtime."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import pipeloom as pl
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import lower
from pipeloom.split import split
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import accumulate, language_loss, make_gpt, tokens

F64 = torch.float64
SEVEN = {  # and how many stages a rank
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def _torch_csv(name: str, num_ranks: int, num_microbatches: int, directory: Path) -> list[str]:
    """What torch writes of one of its own schedules: what it was made as, and, where there is one, the lowered form."""
    chunks = SEVEN[name]
    stage = SimpleNamespace(num_stages=chunks * num_ranks, group_size=num_ranks, group_rank=0, submod=nn.Identity())
    made = getattr(pipelining, name)(stage if chunks == 1 else [stage] * chunks, num_microbatches)
    path = directory / "torch.csv"
    texts = []
    if chunks == 1:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(made.pipeline_order.values())
        texts.append(path.read_text())
    else:
        for form in ("compute_only", "compute_comms"):
            made._dump_csv(path, format=form)
            texts.append(path.read_text())
    return texts


@pytest.mark.parametrize("name", SEVEN)
def test_the_seven_schedules_of_torch_run_here(name: str, tmp_path: Path) -> None:
    for num_ranks in (2, 3, 4):
        m = 2 * num_ranks
        one, *more = [from_csv(text, name=name) for text in _torch_csv(name, num_ranks, m, tmp_path)]
        assert all(other == one for other in more)
        assert bool(one.overlapped) == (name == "ScheduleDualPipeV")
        predicted = pl.check(one).live_activations
        num_layers = one.num_stages
        reference, model = (make_gpt(layers=num_layers, dtype=F64) for _ in range(2))
        batch = tokens(m + 1)
        expected = accumulate(reference, language_loss, *batch, m)
        with pl.Pipeline(model, one, loss_fn=language_loss) as pipe:
            assert torch.equal(pipe.step(*batch), expected)
            assert tuple(pipe.memory.peak_live_activations.values()) == predicted
            for (parameter_name, parameter), other in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-15, msg=parameter_name)


OURS = {  # family and chunks
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-v": 2,
    "v-half": 2,
    "dualpipev": 2,
    "hanayo": 4,
    "search": 2,
}


class _Copied(nn.Module):
    """A stage whose output is no view: torch's split backward detaches it in place, which a view does not allow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).clone()


def _run_in_torch(rank: int, num_ranks: int) -> None:
    m = 2 * num_ranks
    inputs, targets = tokens(2 * m)  # torch wants micro-batches of one size
    for turn, (name, chunks) in enumerate(OURS.items(), num_ranks):
        schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=m, num_chunks=chunks)
        reference = make_gpt(layers=schedule.num_stages, dtype=F64)
        accumulate(reference, language_loss, inputs, targets, m)
        forms = ("compute_only", to_csv(schedule)), ("compute_comms", to_csv(lower(schedule)))
        for form, text in forms[turn % 2 :][:1]:  # one form with 2 ranks, the other with 3
            model = make_gpt(layers=schedule.num_stages, dtype=F64)
            modules = split(model, schedule.num_stages).modules
            stages = [
                pipelining.PipelineStage(_Copied(modules[stage]), stage, schedule.num_stages, torch.device("cpu"))
                for stage in schedule.placement.stages_of[rank]
            ]
            runtime = _PipelineScheduleRuntime(stages, m, loss_fn=language_loss)
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(text)
                file.flush()
                runtime._load_csv(file.name, format=form)
            holds_first, holds_last = stages[0].is_first, stages[-1].is_last
            runtime.step(*([inputs] if holds_first else []), target=targets if holds_last else None, losses=[])
            expected = dict(reference.named_parameters())
            for stage in schedule.placement.stages_of[rank]:
                for parameter_name, parameter in modules[stage].named_parameters():
                    torch.testing.assert_close(
                        parameter.grad,
                        expected[parameter_name].grad,
                        rtol=1e-12,
                        atol=1e-15,
                        msg=lambda text, n=name, f=form, p=parameter_name: f"{n} {f} {p}: {text}",
                    )


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.whole_grid)])
def test_our_schedules_run_in_torchs_runtime(num_ranks: int) -> None:
    run_ranks(_run_in_torch, num_ranks, num_ranks)
