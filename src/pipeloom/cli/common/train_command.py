"""The command line of `pipeloom train` that runs a plan. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import options_of_plan
from pipeloom.train.config.rules import DRAINS, check_stream, steps_between_drains
from pipeloom.train.config.schedule import check_replicas, parse_cut
from pipeloom.train.config.train_config import TrainConfig

_USUAL = {"parallel.chunks": 1, "parallel.data": 1, "parallel.in_flight": "noam", "batch.microbatches": 1}


def stream_command(plan: Plan, options: Mapping[str, Any], *, path: str | None = None) -> str:
    """``pipeloom train`` with a plan of a stream, and with steps at which the stream can drain.

    `options` are further options by dotted name, such as `model.layers`. With `path`, the file of the plan, ``--plan``
    replaces the options that the plan sets. Without a cut, the model gets at least one block per stage.

    Raises:
        InputError: `pipeloom train` cannot run these options; the message says why.
    """
    planned = {key: value for key, value in options_of_plan(plan).items() if value not in (None, _USUAL.get(key))}
    default, model = TrainConfig(), {}
    if isinstance(plan.cut, tuple):
        model["model.layers"] = sum(plan.cut)
    elif plan.pipeline > default.model.layers:
        model["model.layers"] = plan.pipeline
    settled = planned | model | dict(options)
    config = _config(settled)
    check_replicas(config)
    each = steps_between_drains(config)
    steps = {key: -(-getattr(default, key) // each) * each for key in DRAINS if getattr(default, key) % each}
    config = _config(steps | settled)
    check_stream(config)
    parse_cut(config, plan.pipeline)
    first = planned if path is None else {"plan": path}
    more = {key: value for key, value in options.items() if path is None or key not in planned}
    chosen = {**first, **model, **steps, **more}
    return " ".join(["pipeloom train", *(f"--{key} {_word(value)}" for key, value in chosen.items())])


def plan_command(path: str, options: Mapping[str, Any]) -> str:
    """``pipeloom train`` with the plan in the file `path` and further options by dotted name."""
    return " ".join(
        ["pipeloom train", *(f"--{key} {_word(value)}" for key, value in {"plan": path, **options}.items())]
    )


def _config(chosen: Mapping[str, Any]) -> TrainConfig:
    nested: dict[str, Any] = {}
    for key, value in chosen.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return TrainConfig.from_mapping(nested)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
