"""How a stream updates: `UpdateOptions`, `StageUpdate`, and what ranks compare before a run.

Replicas of a stage stay equal because each makes the same updates of the same gradients: their rules have to be the
same. Other stages may have other optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pipeloom.errors import InputError, shortened
from pipeloom.processes.agreement import first_difference, gather_json
from pipeloom.training.pipeline import Pipeline

Groups = Sequence[Mapping[str, Any]]
Rules = dict[str, dict[str, str]]  # by stage, as JSON has its keys: what decides about an update, by name
LearningRate = Callable[[int], float | Sequence[float]]
Discount = Literal["none", "inverse", "pipemare"]


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """One update of one stage.

    Attributes:
        stage: which stage.
        update: its index in the run.
        batch: the last batch in its gradient, counted over all runs.
        num_batches: the number of batches in its gradient: 1, or more for stages with many replicas.
        num_input_batches: the same for an update of the input stage.
        num_before: the number of updates that the stage made before, in all runs.
        delay: the staleness of its gradient: the number of updates between the parameters that computed the gradient
            and those that it changes; the maximum over micro-batches.
    """

    stage: int
    update: int
    batch: int
    num_batches: int
    num_input_batches: int
    num_before: int
    delay: int


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of `pipeloom.Stream` about gradients and learning rates; see there."""

    max_norm: float = math.inf
    learning_rate: LearningRate | None = None
    discount: Discount = "none"
    discount_updates: int | None = None
    scale_by_replicas: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, int | float) or not self.max_norm > 0:
            raise InputError(f"max_norm={self.max_norm!r}: must be a number > 0. Leave it out to disable clipping.")
        if self.discount not in ("none", "inverse", "pipemare"):
            raise InputError(f"discount={self.discount!r}: must be 'none', 'inverse' or 'pipemare'.")
        if self.learning_rate is not None and not callable(self.learning_rate):
            raise InputError(
                f"learning_rate={self.learning_rate!r}: must be callable. Pass a function of the index of a batch, or "
                "set the learning rate in the optimizer."
            )
        updates = self.discount_updates
        counts = isinstance(updates, int) and not isinstance(updates, bool) and updates >= 1
        if not counts if self.discount == "pipemare" else updates is not None:
            raise InputError(
                f"discount_updates={updates!r} with discount={self.discount!r}: 'pipemare' needs an integer >= 1, the "
                "updates until the discount ends; other discounts do not use it. Correct one of them."
            )

    @property
    def sets_rates(self) -> bool:
        """Whether the stream changes the learning rates of the optimizer's groups."""
        return self.learning_rate is not None or self.discount != "none" or self.scale_by_replicas

    def factor(self, update: StageUpdate) -> float:
        """The factor of the learning rate."""
        factor = update.num_batches / update.num_input_batches if self.scale_by_replicas else 1.0
        if self.discount == "inverse":
            return factor / max(update.delay, 1)
        if self.discount_updates is not None:
            exponent = 1 - min(update.num_before / self.discount_updates, 1.0)
            return factor / math.pow(max(update.delay, 1), exponent)
        return factor


def agree(pipeline: Pipeline, terms: Mapping[str, Any], rules: Mapping[int, Rules], live: bool) -> bool:
    """Compare with all other processes; the only communication before a run.

    Args:
        pipeline: that is about to run.
        terms: plain values by name that must be the same on all ranks.
        rules: for each rank of this process, its `update_rules`.
        live: whether this process wants losses during the run.

    Returns:
        Whether rank 0 does.

    Raises:
        InputError: ranks, or replicas of a stage, are about to do different things.
        PeerLost: a process ended before.
    """
    lost = "another rank ended before all began their run; see its error"
    gathered = gather_json([terms, rules, live], pipeline.executor.connection.process_group, lost=lost)
    found = first_difference(enumerate(of_process for of_process, _, _ in gathered))
    if found is not None:
        raise InputError(
            f"rank {found.first} runs with {found.name} {found.one} and rank {found.rank} with {found.other}: all "
            "ranks must run the same stream. Pass the same on each."
        )
    of_rank: dict[int, Rules] = {int(rank): part for _, parts, _ in gathered for rank, part in parts.items()}
    for stage, replicas in enumerate(pipeline.schedule.placement.replicas):
        found = first_difference((rank, of_rank[rank].get(str(stage), {})) for rank in replicas)
        if found is not None:
            one, other = ("none" if rule is None else shortened(rule, 80) for rule in (found.one, found.other))
            raise InputError(
                f"replicas of stage {stage} have {found.name} {one} on rank {found.first} and {other} on rank "
                f"{found.rank}: replicas must make the same updates. Give their optimizers the same parameters, "
                "options and learning rates."
            )
    live_on_first: bool = gathered[0][2]
    return live_on_first


def update_rules(pipeline: Pipeline, rank: int, kind: str, groups: Groups, rates: Sequence[float] | None) -> Rules:
    """How a rank updates its stages with replicas: type of the optimizer, and options of the groups with parameters.

    Args:
        pipeline: the pipeline that trains.
        rank: one of this process.
        kind: type of the optimizer.
        groups: its parameter groups.
        rates: the learning rates that a function returned for the first batch of the run; None: those of the groups.
    """
    rules: Rules = {}
    for stage, module in pipeline.state.stages_of[rank].items():
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
            "learning_rate": "of its groups" if rates is None else "from a function",
            "parameters by group": str(grouped),
            **options,
        }
    return rules


def _is_plain(value: Any) -> bool:
    """Whether an option is a number, a word, or a tuple of these such as betas."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, int | float | str)


def _text(value: Any) -> str:
    """A text that is equal for equal values, such as 1, 1.0 and a tensor of 1."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return str(float(value)) if number else str(value)
