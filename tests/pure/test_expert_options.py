"""Options of models with experts are validated before any process starts, in one line that says what would fit."""

from __future__ import annotations

import pytest

from pipeloom.errors import InputError
from pipeloom.models import GPTConfig
from pipeloom.train.config.rules import validate_settings
from tests.pure.test_tensor_options import config

EIGHT = {"model__experts": 8}
BAD = [
    ({"model__top_k": 2}, "model top_k=2: has no effect without experts. Set experts, or remove top_k."),
    ({"model__router": "switch"}, "model router=switch: has no effect without experts."),
    ({"model__experts": -1}, "model experts=-1: must be 0 (no experts) or more."),
    (
        {**EIGHT, "model__experts_every": 7},
        "model experts_every=7: must be from 1 to layers=6, else no",
    ),
    ({**EIGHT, "model__experts_every": 0}, "model experts_every=0: must be from 1 to layers=6"),
    ({**EIGHT, "model__top_k": 9}, "model top_k=9: a token cannot have more than the 8 experts that there are."),
    ({**EIGHT, "model__capacity_factor": 0.0}, "model capacity_factor=0.0: must be more than 0. Use 1.0 or more."),
    ({**EIGHT, "model__expert_width": 0}, "model expert_width=0: must be at least 1."),
    ({**EIGHT, "model__shared_experts": -1}, "model shared_experts=-1: must be at least 0."),
    (
        {**EIGHT, "model__router": "sigmoid", "model__balance_weight": 0.1},
        "model balance_weight=0.1: router ",
    ),
    (
        {**EIGHT, "model__router": "expert-choice", "parallel__slices": 2, "schedule": "seq1f1b"},
        "model.router=expert-choice: does not work with sequence slices: experts choose among all tokens",
    ),
    (
        {**EIGHT, "model__router": "expert-choice", "parallel__context": 2},
        "model.router=expert-choice: does not work with parallel.context=2: experts choose among all tokens",
    ),
    (
        {**EIGHT, "model__router": "switch", "parallel__data": 2, "local": True},
        "model.router=switch: with --local and several ranks per stage, threads draw from one random generator.",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError) as refused:
        validate_settings(config(**options))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"model__router": "switch", "local": True},
        {"model__router": "topk", "parallel__data": 2, "local": True},
        {"model__router": "gshard", "model__experts_every": 2, "model__capacity_by": "sequence"},
        {"model__router": "sigmoid", "model__top_k": 4, "model__shared_experts": 1, "schedule": "zb-h1"},
    ],
)
def test_options_that_fit(options):
    validate_settings(config(**EIGHT, **options))


def test_blocks_with_experts():
    sizes = GPTConfig(layers=6, experts=4, experts_every=3)
    assert [sizes.has_experts(block) for block in range(6)] == [False, False, True] * 2
