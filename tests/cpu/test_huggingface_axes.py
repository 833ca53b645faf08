"""Models of transformers cut by their own plans along tp and ep compute what the whole model does."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import torch

from pipeloom.parallel.tensor.mixing import mixes_features
from tests.cpu.huggingface_axes import axis_difference, families_with, rounding
from tests.cpu.huggingface_families import PARTS, compared, family, small_model

# Families that differ in what is cut.
CASES = [
    ("tp", "deepseek_v2"),  # latent attention, experts and shared experts
    ("tp", "gemma3n_text"),  # an MLP that reads all its features at once
    ("tp", "inkling_text"),  # an embedding with a norm, results that are summed
    ("tp", "mimo_v2_flash"),  # a parameter with one value per head, values of another width than keys
    ("tp", "doge"),  # attention that reads all heads
    ("tp", "longcat_flash"),  # experts without weights
    ("ep", "mixtral"),  # with the routers' own loss
    ("ep", "muse_spark_text"),  # a norm behind each expert
]


def bound(model) -> float:
    return max(1e-12, 4 * rounding(model))


@pytest.mark.parametrize(("axis", "kind"), CASES, ids=str)
def test_a_family_is_cut_by_its_plan(axis, kind):
    if family(kind) is None:
        pytest.skip(f"this version of transformers has no {kind} with a pipeline plan")
    model = small_model(kind)
    assert axis_difference(model, axis) <= bound(model)


@pytest.mark.whole_grid
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_every_family(axis, part):
    for kind in compared(part):
        if kind in families_with(axis):
            model = small_model(kind)
            assert axis_difference(model, axis) <= bound(model), kind


class Centred(torch.nn.Module):
    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.up, self.down, self.centred = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), centred
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        x = self.up(x).relu()
        return self.down(self.drop(x - x.mean(-1, keepdim=True) if self.centred else x))


def test_features_that_are_mixed_are_found():
    model, other = Centred(False).to("meta"), Centred(True)
    state = torch.get_rng_state()
    assert mixes_features(other, ["up"], ["down"])
    assert not mixes_features(model, ["up"], ["down"])
    assert model.drop.training
    assert not vars(model.up).get("forward")
    assert torch.equal(torch.get_rng_state(), state)
