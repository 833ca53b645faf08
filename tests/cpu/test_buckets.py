"""Parameters of several layers in one bucket, on models with odd layers, against one process on all samples."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.data.full_parameters import FullParameters
from pipeloom.parallel.data.unit_gradients import UnitGradients
from tests.cpu.ranks import run_ranks

BUCKETS = (0, 700, 2**20)  # a layer of 8 x 8 numbers has 576 bytes
STRATEGIES = [
    ("ddp", None, "elements"),
    ("zero1", None, "parameters"),
    ("zero2", "chunk", "elements"),
    ("zero3", "microbatch", "elements"),
]


def mse(output, targets):
    return nn.functional.mse_loss(output, targets)


def linear() -> nn.Linear:
    return nn.Linear(8, 8).double()


def odd_model() -> nn.Sequential:
    """Frozen layers, one that runs twice, one that is tied, some without parameters, some that keep their format."""
    twice, frozen = linear(), linear().requires_grad_(False)
    layers = [linear(), nn.Tanh(), nn.BatchNorm1d(8), twice, frozen, nn.Identity(), linear(), twice]
    layers += [nn.LayerNorm(8), linear(), nn.BatchNorm1d(8), nn.Tanh(), linear(), frozen, linear()]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


class Unknown(nn.Module):
    """Runs its parts in another order than it has them, and one of them not at all; a parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linear() for _ in range(6))
        self.unused = linear()
        self.empty = nn.Parameter(torch.empty(0).double())

    def forward(self, x):
        for part in [*self.parts[3:], *self.parts[:3]]:
            x = part(x).tanh()
        return x


def gradients_of_one_process(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Micro-batches of both copies; each copy has statistics of its own samples."""
    whole = copy.deepcopy(model)
    for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
        (mse(whole(inputs), targets) / 4).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def compare(pipe: pl.Pipeline, wanted: dict[str, torch.Tensor | None], what: object) -> None:
    for name, parameter in pipe.named_parameters():
        start, stop, _ = pipe.state.ranges.get(name, (0, parameter.numel(), None))
        if wanted[name] is None or not parameter.numel():
            assert parameter.grad is None, (what, name)
            continue
        torch.testing.assert_close(
            parameter.grad.flatten(), wanted[name].flatten()[start:stop], rtol=1e-11, atol=1e-14, msg=f"{what} {name}"
        )


def _train(rank: int) -> dict[object, int]:
    mesh = pl.Mesh(dp=2)
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1)).double()
    own = [values.chunk(2)[rank] for values in (x, y)]
    stages = [("odd", odd_model, 2), ("unknown", Unknown, 1)]
    started: Counter[object] = Counter()
    start = UnitGradients.start
    for kind, build, num_stages in stages:
        torch.manual_seed(0)
        wanted = gradients_of_one_process(build(), x, y)
        schedule = pl.schedules.build("bfs", num_ranks=1, num_microbatches=2, num_chunks=num_stages)
        for strategy, granularity, layout in STRATEGIES:
            for bucket_bytes in BUCKETS:
                case = (kind, strategy, granularity, layout, bucket_bytes)

                def count(self, look, case=case):
                    started[case] += 1
                    start(self, look)

                UnitGradients.start = count  # this process ends with the test
                data = pl.DataParallel(strategy, granularity, layout, bucket_bytes)
                torch.manual_seed(0)
                with pl.Pipeline(build(), schedule, loss_fn=mse, mesh=mesh, data=data) as pipe:
                    pipe.step(*own)
                    compare(pipe, wanted, case)
                    if strategy == "zero3":
                        assert pipe.memory.held_bytes().parameters < 1000, "nothing stays gathered"
    return dict(started)


def test_gradients_of_odd_models_in_buckets_of_any_size() -> None:
    for counts in run_ranks(_train, 2):
        for kind in ("odd", "unknown"):
            for strategy in STRATEGIES:
                several = [counts[(kind, *strategy, bucket_bytes)] for bucket_bytes in BUCKETS]
                assert several == sorted(several, reverse=True), (strategy, several)
        assert counts[("unknown", "ddp", None, "elements", 0)] == 15, "layers are not known, parameters are"
        assert counts[("unknown", "ddp", None, "elements", 700)] == 4
        assert counts[("unknown", "ddp", None, "elements", 2**20)] == 1


def _statistics(rank: int) -> None:
    """Under bf16 norms keep their format: units of two formats take turns through the layers."""
    mesh = pl.Mesh(dp=2)
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)
    gathers: list[int] = []
    show = FullParameters.show

    def count(self):
        gathers.append(self.flat.numel())
        show(self)

    FullParameters.show = count  # this process ends with the test
    losses = []
    for bucket_bytes, granularity in ((0, "step"), (2**20, "microbatch")):
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())])
        data = pl.DataParallel("zero3", granularity, bucket_bytes=bucket_bytes)
        with pl.Pipeline(model, schedule, loss_fn=mse, mesh=mesh, data=data, precision="bf16") as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for step in range(2):
                torch.manual_seed(step)
                gathers.clear()
                losses.append(pipe.step(torch.randn(8, 8), torch.randn(8, 8)).item())
                optimizer.step()
                optimizer.zero_grad()
    assert losses[:2] == losses[2:]
    # Of linear layers and of norms, for each of four computations once, also over layers of the other kind.
    assert sorted(size for size in gathers if size > 100) == [128] * 4 + [320] * 4


def test_formats_that_take_turns_change_no_bit() -> None:
    run_ranks(_statistics, 2)


def test_what_is_no_number_of_bytes_is_refused() -> None:
    for wrong in (-1, 1.5, "4MiB"):
        with pytest.raises(InputError, match=r"bucket_bytes=.*: must be an integer number of bytes, at least 0"):
            pl.DataParallel(bucket_bytes=wrong)
