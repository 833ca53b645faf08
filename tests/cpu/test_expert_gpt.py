"""A GPT with experts where the matrix does not go: parts of sequences, ties, ways to shard, Muon. As one process."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.optimizers import make_optimizer
from tests.cpu.pairwise import fewer

SAMPLES, TOKENS, VOCABULARY = 16, 8, 31  # of all replicas


class Case(NamedTuple):
    """One training run; `sizes` of the schedule."""

    degrees: dict[str, Any]
    data: Any = "ddp"
    schedule: str = "1f1b"
    sizes: dict[str, int] | None = None
    tied: bool = False
    optimizer: str = "adamw"
    router: str = "topk"


BY_MICROBATCH = pl.DataParallel("zero3", granularity="microbatch", bucket_bytes=0)
BY_PARAMETERS = pl.DataParallel("zero1", layout="parameters")
CASES = {
    "cp": Case({"dp": 2, "cp": 2, "ep": 2, "expert_axes": ("cp",)}, "zero1", tied=True),
    "dp-cp": Case({"dp": 2, "cp": 2, "ep": 4, "expert_axes": ("dp", "cp")}, "zero3", "zb-h1", router="switch"),
    "cp-tp": Case({"pp": 1, "dp": 2, "cp": 2, "ep": 2, "tp": 2}, "zero2"),
    "slices": Case({"dp": 2, "ep": 2}, "zero2", "seq1f1b", {"num_slices": 2}, router="sigmoid"),
    "tied": Case({"dp": 4, "ep": 2}, "zero3", tied=True),
    "replicated-stages": Case({"dp": 2, "ep": 2}, "zero1", "chimera", tied=True),
    "by-microbatch": Case({"dp": 4, "ep": 2}, BY_MICROBATCH, router="noisy-topk"),
    "server": Case({"dp": 4, "ep": 2}, "parameter-server", "zb-v", {"num_chunks": 2}, router="glam"),
    "muon": Case({"dp": 2, "ep": 2, "tp": 2}, optimizer="muon"),
    "muon-sharded": Case({"dp": 4, "ep": 2}, BY_PARAMETERS, optimizer="muon"),
}


def make_pipeline(case: Case, mesh: pl.Mesh | None) -> pl.Pipeline:
    """In float64. Capacities are ample, and no loss depends on how a batch is divided."""
    config = GPTConfig(
        vocabulary_size=VOCABULARY,
        layers=4,
        width=16,
        heads=4,
        sequence_length=TOKENS,
        tie_embeddings=case.tied,
        experts=4,
        experts_every=2,
        router=case.router,  # type: ignore[arg-type]
        capacity_factor=None if case.router in ("topk", "sigmoid", "noisy-topk") else 4.0,
        balance_weight=0.0,
    )
    model = GPT(config).double().eval()  # without noise
    init_parameters(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    cut = model if mesh is None else pl.parallelize(model, mesh)
    sizes = {"num_microbatches": 4, **(case.sizes or {})}
    schedule = pl.schedules.build(case.schedule, num_ranks=case.degrees.get("pp", 2), **sizes)
    return pl.Pipeline(cut, schedule, loss_fn=loss_fn, mesh=mesh, data=None if mesh is None else case.data)


class Found(NamedTuple):
    """Losses and norms by step, and values of the uncut model."""

    steps: list[tuple[float, float]]
    values: dict[str, Tensor]


def train(case: Case, mesh: pl.Mesh | None, num_steps: int) -> Found:
    dp, replica = (1, 0) if mesh is None else (mesh.degree("dp"), mesh.coordinate("dp"))
    with make_pipeline(case, mesh) as pipe:
        shapes = {name: span.shape for name, span in pipe.state.ranges.items()}
        config = OptimizerConfig(name=case.optimizer, learning_rate=1e-3)  # type: ignore[arg-type]
        optimizer = make_optimizer(pipe.named_parameters(), config, shapes, pipe.state.sharing.blocks)
        stepper, rows = pl.BarrierStep(pipe, optimizer, max_norm=1.0), []
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=generator).chunk(dp)[replica]
            for update in stepper.step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()):
                rows.append((float(update.loss), float(update.grad_norm)))
        return Found(rows, {name: value.clone() for name, value in pipe.state_dict().items()})


@cache
def alone(name: str, num_steps: int) -> Found:
    return train(CASES[name], None, num_steps)


@pytest.mark.parametrize("num_steps", fewer(2, 3))
@pytest.mark.parametrize("name", CASES)
def test_every_process_finds_what_one_finds(name: str, num_steps: int) -> None:
    case, wanted = CASES[name], alone(name, num_steps)

    def work() -> Found:
        with pl.Mesh(**{"pp": 2, **case.degrees}) as mesh:
            return train(case, mesh, num_steps)

    size = math.prod(case.degrees.get(axis, 2 if axis == "pp" else 1) for axis in ("pp", "dp", "cp", "tp"))
    found = pl.run_threads(size, work, timeout_seconds=60.0)
    for each in found:
        for row, other in zip(each.steps, wanted.steps, strict=True):
            assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(row, other, strict=True))
        for key, value in each.values.items():
            assert torch.allclose(value, wanted.values[key], rtol=1e-9, atol=1e-10), key
    assert {key for each in found for key in each.values} == wanted.values.keys()
