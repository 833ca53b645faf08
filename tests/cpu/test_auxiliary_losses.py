"""Auxiliary losses that stages declare: trained exactly as in a plain loop over the same micro-batches."""

from __future__ import annotations

import pytest
import torch

import pipeloom as pl
from tests.cpu.auxiliary_model import Counting, compare, make_batch, make_model, mse, plain_loop

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


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_a_plain_loop(name: str, recompute: str) -> None:
    expected = plain_loop(make_model(), [make_batch()], NUM_MICROBATCHES)
    transport = "threads" if recompute == "none" else "loopback"
    settings = {"loss_fn": mse, "transport": transport, "recompute": recompute}
    with pl.Pipeline(make_model(), schedule_of(name), **settings) as pipe:
        compare(pipe, pipe.step(*make_batch()), expected)


@pytest.mark.parametrize(
    ("name", "data", "recompute"),
    [
        ("1f1b", "ddp", "selective"),
        ("interleaved", "zero3", "full"),
        ("zb-h1", "zero3", "none"),
        ("zb-v", "zero1", "full"),
        ("dualpipev", "zero2", "none"),
        ("seq1f1b", "ddp", "full"),
        ("gpipe", "zero1", "none"),
        ("chimera", "ddp", "none"),
    ],
)
def test_replicas_with_batches_of_different_sizes(name: str, data: str, recompute: str) -> None:
    batches = [make_batch(10), make_batch(7, seed=1)]
    expected = plain_loop(make_model(), batches, NUM_MICROBATCHES)
    schedule = schedule_of(name)

    def work() -> None:
        with (
            pl.Mesh(pp=2, dp=2) as mesh,
            pl.Pipeline(
                make_model(layer=Counting), schedule, loss_fn=mse, recompute=recompute, mesh=mesh, data=data
            ) as pipe,
        ):
            compare(pipe, pipe.step(*batches[mesh.coordinate("dp")]), expected)
            for name, values in pipe.state_dict().items():
                if name.endswith("seen"):
                    assert torch.equal(values, expected.largest[name.split(".")[0]].double())

    pl.run_threads(4, work, timeout_seconds=120)
