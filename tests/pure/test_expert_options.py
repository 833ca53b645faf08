"""Options of expert parallelism: what does not fit is refused in one line; no torch."""

from __future__ import annotations

import pytest

from pipeloom.cli.common.rank_order import order_lines, rank_order
from pipeloom.errors import InputError
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.train_config import TrainConfig

MIXTURE = {"model.experts": 4, "model.layers": 2}
TWO = {**MIXTURE, "parallel.data": 2, "parallel.expert": 2}


def configured(options: dict[str, object]) -> TrainConfig:
    config = TrainConfig()
    for key, value in options.items():
        section, _, name = key.partition(".")
        config = config.changed(section, **{name: value})
    return config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel.expert": 2, "parallel.data": 2}, "the model has no experts. Add --model.experts"),
        ({**TWO, "model.experts": 3}, r"must divide model.experts=3. Use 1 or 3\."),
        ({**TWO, "parallel.expert": 4}, r"that share experts, parallel.data=2. Use 1 or 2, or other degrees\."),
        ({**TWO, "parallel.data": 1}, r"Use --parallel.data 2\."),
        ({**TWO, "parallel.expert_axes": "context"}, r"parallel.context=1. Use --parallel.context 2\."),
        ({**TWO, "parallel.expert": 4, "parallel.expert_axes": "data,context"}, "parallel.data=2 x parallel.context=1"),
        ({**TWO, "parallel.expert_exchange": "capacity"}, "have no capacity. Add --model.capacity_factor"),
        ({**TWO, "parallel.expert": 0}, "parallel.expert=0: must be at least 1"),
        (
            {**MIXTURE, "parallel.tensor": 4, "parallel.tensor_layout": "2d"},
            r"not support layers of experts.* Use 1d",
        ),
        ({**MIXTURE, "parallel.tensor": 2, "model.expert_width": 7}, "must divide the width of an expert, 7"),
        ({**MIXTURE, "parallel.expert_axes": "context"}, "has no effect with one expert-parallel rank"),
        ({**MIXTURE, "parallel.expert_exchange": "capacity"}, "has no effect with one expert-parallel rank"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        validate_settings(configured(options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [{}, {"parallel.tensor": 2}, {"parallel.data": -1}])
def test_options_that_fit(more: dict[str, object]) -> None:
    config = configured({**TWO, **more})
    validate_settings(config)
    shape = config.mesh_shape(8 if "parallel.data" in more else None)
    assert shape.degree("ep") == 2


def test_the_rank_order_has_the_processes_that_share_experts() -> None:
    rows = rank_order(configured({**TWO, "parallel.data": 4, "parallel.tensor": 2}), 4)
    assert [(row.axis, row.ranks) for row in rows][-2:] == [("dp", (0, 4, 8, 12)), ("ep", (0, 4))]
    warning = order_lines(rows)[-1]
    assert "warning: ep communicates in each layer" in warning
    assert warning.endswith("Lower --parallel.expert.")
