"""Options of tensor and context parallelism are validated before any process starts, with what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.cli.common.rank_order import order_lines, rank_order
from pipeloom.errors import InputError
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import process_names
from pipeloom.train.config.train_config import TrainConfig


def config(**options: Any) -> TrainConfig:
    """A configuration with other values of ``section__name`` or ``name``."""
    mapping: dict[str, Any] = {"parallel": {"pipeline": 2}}
    for key, value in options.items():
        section, _, name = key.rpartition("__")
        (mapping.setdefault(section, {}) if section else mapping)[name] = value
    return TrainConfig.from_mapping(mapping)


GOOD: list[dict[str, Any]] = [
    {"parallel__tensor": 2},
    {"parallel__tensor": 3, "parallel__sequence": True, "model__sequence_length": 96},
    {"parallel__tensor": 6, "model__kv_heads": 2, "optimizer__name": "sgd"},
    {"parallel__tensor": 4, "parallel__tensor_layout": "2d"},
    {"parallel__tensor": 8, "parallel__tensor_layout": "2.5d", "parallel__tensor_depth": 2},
    {"parallel__tensor": 8, "parallel__tensor_layout": "3d"},
    {"parallel__context": 2},
    {"parallel__tensor": 2, "optimizer__name": "muon"},
    {"parallel__tensor": 2, "local": True},
    {"parallel__data": 2, "local": True},
    {"parallel__tensor": 2, "memory__cap": "4GiB"},
    {"parallel__context": 3, "parallel__context_kind": "ulysses", "model__sequence_length": 96},
    {"parallel__context": 2, "parallel__data_strategy": "zero3"},
    {"parallel__context": 2, "parallel__tensor": 2, "parallel__data": 2, "parallel__order": "tp,dp,pp,cp"},
    {"parallel__tensor": 2, "schedule": "seq1f1b", "parallel__slices": 2, "parallel__sequence": True},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"parallel__tensor": 0}, "parallel.tensor=0: must be at least 1"),
    ({"parallel__context": 0}, "parallel.context=0: must be at least 1"),
    ({"parallel__tensor": 4}, "model.heads=6: must be a multiple of 4 with parallel.tensor=4. Use 4 or 8"),
    ({"parallel__tensor": 3, "model__kv_heads": 2}, "model.kv_heads=2: must divide parallel.tensor=3"),
    ({"parallel__sequence": True}, "parallel.sequence=true: has no effect with one tensor-parallel rank"),
    ({"parallel__tensor_layout": "2d"}, "parallel.tensor_layout=2d: has no effect with one tensor-parallel rank"),
    ({"parallel__context_kind": "ulysses"}, "parallel.context_kind=ulysses: has no effect with one context-parallel"),
    ({"parallel__tensor": 2, "parallel__tensor_depth": 2}, "parallel.tensor_depth=2: has no effect with parallel."),
    (
        {"parallel__tensor": 4, "parallel__tensor_layout": "2d", "parallel__sequence": True},
        "parallel.sequence=true: works with parallel.tensor_layout=1d alone, not 2d",
    ),
    ({"parallel__tensor": 3, "parallel__tensor_layout": "2d"}, "tp=3 with layout 2d: must be a square"),
    ({"parallel__tensor": 8, "parallel__tensor_layout": "2.5d"}, "parallel.tensor_depth is missing"),
    ({"parallel__context": 2, "model__dropout": 0.1}, "model.dropout=0.1: does not work with parallel.context=2"),
    (
        {"parallel__tensor": 4, "parallel__tensor_layout": "2d", "batch__size": 36, "batch__microbatches": 4},
        "batch.size=36: parallel.tensor_layout=2d cuts each micro-batch into 2 parts, so batch.size must be a "
        "multiple of 8. Use 40",
    ),
    (
        {"parallel__tensor": 3, "parallel__sequence": True},
        "model.sequence_length=128: must be a multiple of 3 with parallel.tensor=3 with parallel.sequence=true. Use "
        "126 or 129",
    ),
    (
        {"parallel__context": 3},
        "model.sequence_length=128: must be a multiple of 6 with parallel.context=3 with parallel.context_kind=ring",
    ),
    (
        {"parallel__context": 4, "parallel__context_kind": "ulysses"},
        "parallel.context=4: context_kind ulysses divides 6 query heads and 6 key heads between the processes. Use "
        "1, 2, 3 or 6, or ring",
    ),
    (
        {"parallel__context": 2, "parallel__slices": 2},
        "parallel.context=2: does not work with sequence slices",
    ),
    ({"parallel__context": 2, "schedule": "pipedream"}, "parallel.context=2: does not work with asynchronous schedule"),
    (
        {"parallel__tensor": 2, "local": True, "model__dropout": 0.1},
        "model.dropout=0.1: with --local and several",
    ),
    ({"parallel__tensor": 2, "optimizer__barrier": False}, "optimizer.barrier=false: does not work with parallel.tens"),
    ({"parallel__tensor": 2, "parallel__order": "dp"}, "parallel.order=dp: must be dp,pp or pp,dp, with cp and tp"),
    ({"parallel__tensor": 2, "parallel__order": "dp,pp,pp"}, "parallel.order=dp,pp,pp: must be dp,pp or pp,dp"),
]


@pytest.mark.parametrize("options", GOOD)
def test_what_fits_passes(options: dict[str, Any]) -> None:
    validate_settings(config(**options))


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_settings(config(**options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_processes_of_all_axes_have_names() -> None:
    names = process_names(config(parallel__tensor=2, parallel__context=2, parallel__data=2))
    assert len(names) == 16
    assert names[:5] == [
        "rank 0 (cp 0, tp 0) of replica 0",
        "rank 0 (cp 0, tp 1) of replica 0",
        "rank 0 (cp 1, tp 0) of replica 0",
        "rank 0 (cp 1, tp 1) of replica 0",
        "rank 1 (cp 0, tp 0) of replica 0",
    ]
    assert process_names(config()) == ["rank 0", "rank 1"]


def test_a_configuration_goes_to_yaml_and_back() -> None:
    one = config(parallel__tensor=4, parallel__tensor_layout="2d", parallel__context=2)
    assert TrainConfig.from_mapping(one.to_mapping()) == one
    assert one.num_processes == 16


def test_the_rank_order_is_told_and_slow_links_are_warned_about() -> None:
    one = config(parallel__data=4, parallel__tensor=8)
    lines = order_lines(rank_order(one, 8))
    assert lines == [
        "tp     8 processes, such as ranks 0 1 2 3 ..: activations of each layer, within a node",
        "pp     2 processes, such as ranks 0 8: activations between stages, between nodes",
        "dp     4 processes, such as ranks 0 16 32 48: gradients and parameters once per step, between nodes",
    ]
    far = config(parallel__data=4, parallel__tensor=8, parallel__order="tp,dp,pp")
    assert order_lines(rank_order(far, None))[-1].startswith("tp ")
    assert order_lines(rank_order(far, 8))[-1].startswith("warning: tp communicates in each layer")
    assert rank_order(config(parallel__pipeline=1), None) == []
