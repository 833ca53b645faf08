"""Expert-parallel replicas that find gradients for different parameters in a backward that exchanges tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.cpu.inside_stage import compare_gradients
from tests.cpu.test_expert_parallel import make_model

STEPS = 3


class Uneven(nn.Module):
    """Experts between dense layers, some of which only batches with a positive first number pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.inner = make_model()
        self.second = nn.Linear(6, 6, bias=False)
        self.outer = make_model()
        self.third = nn.Linear(6, 6, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passes = bool(x[0, 0, 0] > 0)
        y = self.inner(self.first(x))
        y = self.outer(self.second(y) if passes else y)
        return self.third(y) if passes else y


@pytest.mark.parametrize("data", ["zero1", "zero3", "parameter-server"])
def test_no_backward_waits_for_a_replica_that_waits_in_it(data: str) -> None:
    torch.manual_seed(1)
    base = nn.Sequential(Uneven())
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64)
    x[:, 0, 0, 0] = torch.tensor([1.0, -1.0])
    wanted = copy.deepcopy(base)
    with pl.auxiliary_losses() as found:
        loss = sum(nn.functional.mse_loss(wanted(each), each) for each in x) / 2
    (loss + found.total() / 2).backward()
    gradients = {name: parameter.grad for name, parameter in wanted.named_parameters() if parameter.grad is not None}

    def work() -> None:
        with pl.Mesh(dp=2, ep=2) as mesh:
            model = pl.parallelize(copy.deepcopy(base), mesh)
            schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
            options = pl.DataParallel(data, bucket_bytes=0)
            with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data=options) as pipe:
                own = x[mesh.coordinate("dp")]
                for _ in range(STEPS):  # replicas know from the first step on that their gradients differ
                    assert abs(pipe.step(own, own).item() - loss.item()) < 1e-12
                    compare_gradients(pipe, gradients, data)
                    for parameter in pipe.parameters():
                        parameter.grad = None

    pl.run_threads(2, work, timeout_seconds=20)
