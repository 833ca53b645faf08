"""Auxiliary losses that stages declare: trained exactly as in a plain loop over the same micro-batches."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import pipeloom as pl
from tests.cpu.auxiliary_model import Counting, compare, make_batch, make_model, mse, plain_loop
from tests.cpu.pairwise import in_turn

SCHEDULES = {
    "1f1b": {},
    "interleaved": {"num_chunks": 2},
    "zb-h1": {},
    "zb-v": {},
    "dualpipev": {},
    "gpipe": {},
    "seq1f1b": {"num_slices": 3},
    "chimera": {},
}
NUM_MICROBATCHES = 4  # of 10 samples: 3, 3, 2, 2


def schedule_of(name: str) -> pl.Schedule:
    return pl.schedules.build(name, num_ranks=2, num_microbatches=NUM_MICROBATCHES, **SCHEDULES[name])


@pytest.mark.parametrize(("name", "recompute"), in_turn(SCHEDULES, ["none", "full", "selective"]))
def test_gradients_are_those_of_a_plain_loop(name: str, recompute: str) -> None:
    expected = plain_loop(make_model(), [make_batch()], NUM_MICROBATCHES)
    transport = "threads" if recompute == "none" else "loopback"
    settings = {"loss_fn": mse, "transport": transport, "recompute": recompute}
    with pl.Pipeline(make_model(), schedule_of(name), **settings) as pipe:
        compare(pipe, pipe.step(*make_batch()), expected)


class Case(NamedTuple):
    """One run of two replicas in threads. With three ranks, the second reads neither inputs nor targets."""

    name: str
    num_ranks: int
    num_microbatches: int
    data: str
    recompute: str


def train_and_compare(case: Case) -> None:
    batches = [make_batch(10), make_batch(7, seed=1)]
    expected = plain_loop(make_model(), batches, case.num_microbatches)
    sizes = {"num_ranks": case.num_ranks, "num_microbatches": case.num_microbatches, **SCHEDULES[case.name]}
    schedule = pl.schedules.build(case.name, **sizes)

    def work() -> None:
        with (
            pl.Mesh(pp=case.num_ranks, dp=2) as mesh,
            pl.Pipeline(
                make_model(layer=Counting), schedule, loss_fn=mse, recompute=case.recompute, mesh=mesh, data=case.data
            ) as pipe,
        ):
            compare(pipe, pipe.step(*batches[mesh.coordinate("dp")]), expected)
            for name, values in pipe.state_dict().items():
                if name.endswith("seen"):
                    assert torch.equal(values, expected.largest[name.split(".")[0]].double())

    pl.run_threads(2 * case.num_ranks, work, timeout_seconds=120)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 3, 4, "ddp", "selective"),
        Case("interleaved", 2, 4, "zero3", "full"),
        Case("zb-h1", 3, 5, "zero3", "none"),
        Case("zb-v", 3, 6, "zero1", "full"),
        Case("dualpipev", 2, 4, "zero2", "none"),
        Case("seq1f1b", 3, 3, "ddp", "full"),
        Case("gpipe", 3, 2, "zero1", "none"),
        Case("chimera", 2, 4, "ddp", "none"),
    ],
    ids=str,
)
def test_replicas_with_batches_of_different_sizes(case: Case) -> None:
    train_and_compare(case)


@pytest.mark.whole_grid
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "chimera"])
def test_every_combination(name: str, num_ranks: int, recompute: str, data: str) -> None:
    train_and_compare(Case(name, num_ranks, 6, data, recompute))
