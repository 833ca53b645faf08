"""Tensor-parallel ranks as processes, whose collectives pass through shared memory."""

from __future__ import annotations

import math

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import loss_fn
from pipeloom.parallel.placed import placed_block
from tests.cpu.ranks import run_ranks
from tests.cpu.tensor_cases import Result, assert_equal, batch, build, config, joined, one_process


def _step(rank: int, degrees: dict[str, int], schedule: str, sequence: bool, dropout: float):
    inputs, targets = batch()
    torch.manual_seed(11)
    with pl.Mesh(**degrees) as mesh:
        model = pl.parallelize(build(config(kv_heads=2, dropout=dropout)), mesh, sequence=sequence)
        made = pl.schedules.build(schedule, num_ranks=degrees["pp"], num_microbatches=4)
        with pl.Pipeline(model, made, loss_fn=loss_fn, mesh=mesh) as pipe:
            loss = pipe.step(inputs, targets).item()
        pieces = [
            (name, None if (block := placed_block(p)) is None else tuple(block), p.grad.numpy())
            for name, p in pipe.named_parameters()
        ]
        return loss, pieces


def _full_gradients(found):
    return joined([(name, block, torch.from_numpy(array)) for name, block, array in own] for _, own in found)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_processes_equal_one_process(sequence):
    found = run_ranks(_step, 4, {"pp": 2, "tp": 2}, "zb-h1", sequence, 0.0)
    expected = one_process(build(config(kv_heads=2)))
    assert_equal(Result(found[0][0], _full_gradients(found), {}), expected)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dropout_without_slices_is_the_same_on_ranks_with_the_same_seed(sequence):
    """`joined` compares all gradients that several ranks hold."""
    found = run_ranks(_step, 2, {"pp": 1, "tp": 2}, "gpipe", sequence, 0.3)
    assert found[0][0] == found[1][0]
    assert math.isfinite(found[0][0])
    _full_gradients(found)


def _seeded_step(rank: int) -> list[str]:
    found = []
    torch.manual_seed(rank)
    with pl.Mesh(tp=2) as mesh:
        model = pl.parallelize(build(config(kv_heads=2, dropout=0.1)), mesh)
        made = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=4)
        with pl.Pipeline(model, made, loss_fn=loss_fn, mesh=mesh) as pipe:
            for module in pipe.modules():
                module.register_buffer("valueless", torch.ones(1, device="meta") if rank else None)
            for _ in ("one rank has no values", "the seeds differ"):
                with pytest.raises(InputError) as refused:
                    pipe.step(*batch())
                found.append(str(refused.value))
                for module in pipe.modules():
                    module.valueless = None
            torch.manual_seed(1)
            assert math.isfinite(pipe.step(*batch()))
    return found


def test_ranks_without_values_or_with_other_seeds_are_refused_before_they_draw():
    for valueless, seeds in run_ranks(_seeded_step, 2):
        assert "'valueless' of stage 0 is on the meta device" in valueless
        assert "different random numbers for dropout" in seeds
        assert "torch.manual_seed" in seeds
