"""Plans compared by steps."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks

INPUTS, TARGETS = torch.randn(8, 4), torch.randn(8, 4)
LOSS = nn.functional.mse_loss


def _plan(schedule: str, seconds: float | None) -> pl.Plan:
    return pl.Plan(schedule=schedule, pipeline=2, microbatches=4, predicted_step_seconds=seconds)


def _choose(rank: int) -> tuple[str, set[str]]:
    """Where GPipe is predicted to be the fastest, and is not."""
    started = set[str]()

    def start(plan: pl.Plan) -> pl.Pipeline:
        started.add(plan.make_schedule().name)
        torch.manual_seed(0)
        return pl.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan, loss_fn=LOSS)

    def step(pipe: pl.Pipeline) -> None:
        pipe.step(INPUTS, TARGETS)
        if pipe.schedule.name == "gpipe" and rank:
            time.sleep(0.03)

    # zb-h1 is predicted too slow to be tried, also beside other load; plans of process 0 count.
    plans = [_plan("zb-h1", 1.12), _plan("1f1b", 1.05), _plan("gpipe", 1.0)]
    return pl.fastest_plan([] if rank else plans, start, step).make_schedule().name, started


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_the_plan_whose_steps_are_the_fastest_is_chosen_on_all_processes() -> None:
    assert run_ranks(_choose, 2) == [("1f1b", {"1f1b", "gpipe"})] * 2


def test_one_plan_runs_no_steps_and_no_plan_is_one_line() -> None:
    plan = _plan("1f1b", None)
    assert pl.fastest_plan([plan], pytest.fail, pytest.fail) is plan
    with pytest.raises(InputError, match=r"fastest_plan got no plans\. Pass those of pipeloom\.plans\."):
        pl.fastest_plan([], pytest.fail, pytest.fail)
