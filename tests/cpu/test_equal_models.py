"""Ranks that share layers start from equal weights, and threads that share a random generator recompute no dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError

PLAN = {"*.0": "column", "*.2": "row"}


def model(seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, generator=generator)
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("changed", ["none", "1.2.weight", "0.0.bias", "swapped"])
def test_ranks_with_other_weights_are_refused_by_name(dtype: torch.dtype, changed: str) -> None:
    def work() -> str:
        mesh = pl.Mesh(pp=1, tp=2)
        mine = model(1).to(dtype)
        with torch.no_grad():
            if mesh.coordinate("tp") == 1 and changed == "swapped":  # equal numbers in another order
                mine[0][0].bias.copy_(mine[0][0].bias.flip(0))
            elif mesh.coordinate("tp") == 1 and changed != "none":
                mine.get_parameter(changed).view(-1)[-1] += 1
        try:
            pl.parallelize(mine, mesh, PLAN)
        except InputError as error:
            assert all(parameter.shape[0] in (4, 8) for parameter in mine.parameters())
            return str(error)
        return ""

    name = "0.0.bias" if changed == "swapped" else changed
    for said in pl.run_threads(2, work):
        if changed == "none":
            assert said == ""
        else:
            assert said.startswith(f"parameter '{name}' has other values on tensor-parallel rank")
            assert "\n" not in said


def test_models_of_other_sizes_are_refused() -> None:
    def work() -> None:
        mesh = pl.Mesh(tp=2)
        mine = model(1)
        if mesh.coordinate("tp") == 1:
            mine.append(nn.Linear(4, 4))
        pl.parallelize(mine, mesh, PLAN)

    with pytest.raises(InputError, match="the model has 8 parameters with values on tensor-parallel rank 0, and"):
        pl.run_threads(2, work)


@pytest.mark.parametrize(
    ("recompute", "p", "refused"), [("full", 0.1, True), ("full", 0.0, False), ("none", 0.1, False)]
)
def test_threads_do_not_recompute_dropout(recompute: str, p: float, refused: bool) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)

    def work() -> None:
        pl.Pipeline(made, schedule, loss_fn=nn.MSELoss(), mesh=pl.Mesh(pp=2), recompute=recompute).close()

    if refused:
        with pytest.raises(InputError, match=r"recompute='full' with dropout does not work in threads of run_threads"):
            pl.run_threads(2, work)
    else:
        pl.run_threads(2, work)
