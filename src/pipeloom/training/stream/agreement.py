"""What ranks compare before a run of a stream starts: what they are about to run, and how replicas update.

Replicas of a stage stay equal because each makes the same updates of the same gradients: the rules have to be the
same. Other stages may have other optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeloom.errors import InputError, shortened
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.training.pipeline import Pipeline

Groups = Sequence[Mapping[str, Any]]
Rules = dict[str, dict[str, str]]  # by stage, as JSON has its keys: what decides about an update, by name


def agree(pipeline: Pipeline, own: Mapping[str, Any], rules: Mapping[int, Rules], live: bool) -> bool:
    """Compare with all other processes; the only communication before a run.

    Args:
        pipeline: that is about to run.
        own: by name, what all ranks have to have alike; plain values.
        rules: for each rank of this process, its `update_rules`.
        live: whether this process wants losses as they come.

    Returns:
        Whether rank 0 does.

    Raises:
        InputError: ranks, or replicas of a stage, are about to do different things.
        PeerLost: a process ended before.
    """
    told: list[tuple[dict[str, Any], dict[str, Rules], bool]]
    payload = json.dumps([own, rules, live])
    if pipeline.process_group is None:
        told = [json.loads(payload)]
    else:
        lost = "another rank ended before all began their run; see what it said"
        told = [json.loads(part) for part in all_gather_bytes(payload.encode(), pipeline.process_group, lost=lost)]
    (first, _, first_live), *others = told
    for rank, (other, *_) in enumerate(others, 1):
        name = next((name for name in own if other[name] != first[name]), None)
        if name is not None:
            raise InputError(
                f"rank 0 runs with {name} {first[name]} and rank {rank} with {other[name]}: all ranks run one stream; "
                "pass the same on each"
            )
    of_ranks = {int(rank): found for _, parts, _ in told for rank, found in parts.items()}
    for stage, replicas in enumerate(pipeline.schedule.placement.replicas):
        for rank in replicas[1:]:
            _compare(stage, replicas[0], rank, of_ranks)
    return first_live


def _compare(stage: int, first: int, other: int, rules: Mapping[int, Rules]) -> None:
    one, two = rules[first].get(str(stage), {}), rules[other].get(str(stage), {})
    name = next((name for name in {**one, **two} if one.get(name) != two.get(name)), None)
    if name is not None:
        seen = [
            f"{shortened(rule.get(name, 'none'), 80)} on rank {rank}" for rank, rule in ((first, one), (other, two))
        ]
        raise InputError(
            f"replicas of stage {stage} have {name} {' and '.join(seen)}: they make the same updates; give their "
            "optimizers the same parameters, options and learning rates"
        )


def update_rules(pipeline: Pipeline, rank: int, kind: str, groups: Groups, rates: Sequence[float] | None) -> Rules:
    """How a rank updates its stages that have replicas: kind of optimizer, and options of the groups that count.

    Args:
        pipeline: that trains.
        rank: one of this process.
        kind: of the optimizer.
        groups: of its parameters.
        rates: the learning rates that a function gives for the first batch of the run; None: those of the groups.
    """
    rules: Rules = {}
    for stage, module in pipeline.workers[rank].stages.items():
        number = {p: k for k, p in enumerate(p for p in module.parameters() if p.requires_grad)}
        if not number or len(pipeline.schedule.placement.replicas[stage]) == 1:
            continue
        grouped: list[list[int]] = []
        options: dict[str, str] = {}
        for which, group in enumerate(groups):
            held = [number[p] for p in group["params"] if p in number]
            if held:
                values = {**group, **({} if rates is None else {"lr": rates[which]})}
                name = f"of group {len(grouped)}"
                options |= {f"{key} {name}": _text(value) for key, value in values.items() if _is_plain(value)}
                grouped.append(held)
        rules[str(stage)] = {
            "optimizer": kind,
            "learning_rate": "as groups have it" if rates is None else "from a function",
            "parameters by group": str(grouped),
            **options,
        }
    return rules


def _is_plain(value: Any) -> bool:
    """Numbers, words, and pairs of numbers such as betas; no parameters."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, int | float | str)


def _text(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are, and so are a number and a tensor of it."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return str(float(value)) if number else str(value)
