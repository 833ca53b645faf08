"""The command that trains a partition as a stream: `pipeloom partition` prints it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.train.config.schedule_choice import parse_cut
from pipeloom.train.config.stream_rules import DRAINS, check_replicas, check_streamed, steps_between_drains
from pipeloom.train.config.train_config import TrainConfig


def stream_command(
    replicas: Sequence[int],
    layers: Sequence[Sequence[str]],
    *,
    full: bool,
    options: Mapping[str, Any],
    tied: bool = False,
) -> str:
    """``pipeloom train`` with pipedream on these stages, one that it does not refuse.

    Args:
        replicas: ranks of each stage.
        layers: the names of the layers of each stage. Where they are those of pipeloom's GPT, its cut is theirs.
        full: ``--parallel.in_flight full``.
        options: more of them, by their dotted names.
        tied: some of the layers share weights; of pipeloom's GPT, embedding and head do.

    Raises:
        InputError: `pipeloom train` would refuse such a run; in one line, why.
    """
    chosen: dict[str, Any] = {
        "schedule": "pipedream",
        "parallel.pipeline": len(replicas),
        "parallel.replicas": ",".join(map(str, replicas)),
    }
    names, default = [name for stage in layers for name in stage], TrainConfig()
    if names == ["embedding", *(f"blocks.{k}" for k in range(len(names) - 3)), "norm", "head"]:
        counts = [sum(name.startswith("blocks.") for name in stage) for stage in layers]
        chosen |= {"parallel.cut": ",".join(map(str, counts)), "model.layers": sum(counts)}
        if tied:
            chosen["model.tie_embeddings"] = True
    elif len(replicas) > default.model.layers:  # of another model: a GPT that can be cut into as many stages
        chosen["model.layers"] = len(replicas)
    if full:
        chosen["parallel.in_flight"] = "full"
    config = _config(chosen | dict(options))
    check_replicas(config)
    each = steps_between_drains(config)
    for key in DRAINS:
        if getattr(default, key) % each:
            chosen[key] = -(-getattr(default, key) // each) * each
    chosen |= options
    config = _config(chosen)
    check_streamed(config)
    parse_cut(config, len(replicas))
    return " ".join(["pipeloom train", *(f"--{key} {_word(value)}" for key, value in chosen.items())])


def _config(chosen: Mapping[str, Any]) -> TrainConfig:
    nested: dict[str, Any] = {}
    for key, value in chosen.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return TrainConfig.from_mapping(nested)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
