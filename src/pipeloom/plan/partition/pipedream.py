"""PipeDream's partitioner: which layers make a stage, on how many ranks, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.plan.partition.problem import Form, Problem
from pipeloom.plan.partition.profile import Profile
from pipeloom.plan.partition.stage_search import Node, Pipelines
from pipeloom.schedules.pipedream import full_in_flight, noam_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, and what it takes for each minibatch.

    Attributes:
        first, last: its layers, from 0, both inclusive.
        replicas: ranks that hold it.
        replicas_by_level: how many on each level, innermost first; `replicas` is their product.
        compute_seconds: computing.
        sync_seconds: sums of gradients over replicas, on all levels (the longest of them in the published form).
        transfer_seconds: its output to the next stage and the gradient back; 0 behind the last.
        period_seconds: of a minibatch, of computing and synchronising as the form adds them up.
        in_flight: minibatches that await their backward, and versions of the weights, with PipeDream's NOAM.
        memory_bytes: of each of its ranks, with as many in flight; this is what a memory cap limits.
        full_in_flight, full_memory_bytes: the same with as many in flight as make no stage wait, which may be more.
    """

    first: int
    last: int
    replicas: int
    replicas_by_level: tuple[int, ...]
    compute_seconds: float
    sync_seconds: float
    transfer_seconds: float
    period_seconds: float
    in_flight: int
    memory_bytes: float
    full_in_flight: int
    full_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What a period is as long as: a stage that mostly computes or synchronises, or the transfer behind it."""

    kind: Literal["compute", "sync", "transfer"]
    stage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages that share all ranks.

    Attributes:
        stages: in order.
        period_seconds: of a minibatch, in the steady state.
        bottleneck: why it is not shorter.
        fewer_ranks: (ranks, seconds) where the best partition over fewer ranks has a shorter period; None where there
            is none, or on several levels.
    """

    stages: tuple[Stage, ...]
    period_seconds: float
    bottleneck: Bottleneck
    fewer_ranks: tuple[int, float] | None = None

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def full_memory_bytes(self) -> float:
        """Of the fullest rank, with as many in flight as make no stage wait."""
        return max(stage.full_memory_bytes for stage in self.stages)


def partition_layers(
    profile: Profile,
    levels: Sequence[tuple[int, float]],
    *,
    form: Form = "summed",
    memory_cap: float | None = None,
    state_copies: float = 0.0,
    replicate: bool = True,
) -> Partition:
    """The partition of shortest period; of those, one of fewest stages.

    Args:
        profile: of one minibatch.
        levels: ``(components, bytes per second)``, innermost first. ``[(8, 1e9)]`` are 8 ranks joined by 1 GB/s,
            ``[(4, 12e9), (2, 1.25e9)]`` 2 nodes of 4 ranks. A stage takes whole components of a level or lies in one.
        form: how compute and sync add up: see `pipeloom.plan.partition.problem`.
        memory_cap: most bytes a rank may hold.
        state_copies: of the weights, for gradients and optimizer (AdamW: 3), beside their versions.
        replicate: whether a stage may have several ranks; if not, there is one stage for each.

    Raises:
        InputError: a number is impossible, no partition keeps the memory cap (the message has the smallest that one
            does), or there are fewer layers than ranks and no replicas.
    """
    problem = Problem(profile, levels, form=form, memory_cap=memory_cap, state_copies=state_copies)
    most = None if replicate else 1
    if not replicate and problem.num_layers < problem.num_ranks:
        raise InputError(
            f"{counted(problem.num_layers, 'layer')} for {counted(problem.num_ranks, 'rank')}: without replicas each "
            "rank needs a layer; use fewer ranks"
        )
    pipelines = Pipelines(problem, most_replicas=most)
    by_ranks = pipelines.by_ranks()
    if not math.isfinite(by_ranks[-1]):
        least = math.ceil(Pipelines(problem, memory=True, most_replicas=most).by_ranks()[-1])
        raise InputError(
            f"memory cap {memory_cap:g}: every partition of {counted(problem.num_layers, 'layer')} over "
            f"{counted(problem.num_ranks, 'rank')} holds more on some rank; {least} bytes are the least that one needs;"
            " raise memory_cap (--memory-cap) to that"
        )
    fewer = int(np.argmin(by_ranks))
    shorter = len(problem.levels) == 1 and replicate and by_ranks[fewer] < by_ranks[-1]
    return _judge(problem, pipelines.plan(), fewer_ranks=(fewer, float(by_ranks[fewer])) if shorter else None)


def data_parallel(
    profile: Profile, levels: Sequence[tuple[int, float]], *, form: Form = "summed", state_copies: float = 0.0
) -> Partition:
    """All layers as one stage on all ranks, by the same measure."""
    problem = Problem(profile, levels, form=form, state_copies=state_copies)
    nodes: tuple[Node, ...] = ()
    for level in problem.levels:
        nodes = (Node(0, problem.num_layers - 1, level.components, nodes),)
    return _judge(problem, nodes)


def _judge(problem: Problem, nodes: Sequence[Node], fewer_ranks: tuple[int, float] | None = None) -> Partition:
    """What a pipeline takes, and why, computed from its stages alone."""
    leaves = list(_leaves(problem, nodes, len(problem.levels) - 1, (), ()))
    replicas = [math.prod(leaf.by_level) for leaf in leaves]
    noam, full = noam_in_flight(replicas), full_in_flight(replicas)
    worst = Bottleneck(kind="compute", stage=0, seconds=-1.0)
    stages = []
    for number, leaf in enumerate(leaves):
        node, count = leaf.node, replicas[number]
        sizes = problem.weights[node.first, node.last], problem.kept[node.first, node.last]
        held = problem.held_bytes(*sizes, np.array([noam[number], full[number]]))
        kind: Literal["compute", "sync"] = "compute" if leaf.compute >= leaf.sync else "sync"
        own = float(problem.both(leaf.compute, leaf.sync))  # type: ignore[arg-type]
        if own > worst.seconds:
            worst = Bottleneck(kind=kind, stage=number, seconds=own)
        through = float(problem.both(leaf.transfer, leaf.outer_sync)) if leaf.transfer else 0.0  # type: ignore[arg-type]
        if through > worst.seconds:
            worst = Bottleneck(kind="transfer", stage=number, seconds=through)
        stages.append(
            Stage(
                first=node.first,
                last=node.last,
                replicas=count,
                replicas_by_level=leaf.by_level,
                compute_seconds=leaf.compute,
                sync_seconds=leaf.sync,
                transfer_seconds=leaf.transfer,
                period_seconds=own,
                in_flight=noam[number],
                memory_bytes=float(held[0]),
                full_in_flight=full[number],
                full_memory_bytes=float(held[1]),
            )
        )
    return Partition(stages=tuple(stages), period_seconds=worst.seconds, bottleneck=worst, fewer_ranks=fewer_ranks)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A stage of the lowest level: its times for a minibatch, with those of the components that it is a part of."""

    node: Node
    by_level: tuple[int, ...]
    compute: float
    sync: float
    transfer: float  # behind it, on whatever level
    outer_sync: float  # of the components of which that transfer is a part


def _leaves(
    problem: Problem, nodes: Sequence[Node], level: int, outer: tuple[int, ...], syncs: tuple[float, ...]
) -> Iterator[_Leaf]:
    """The stages of the lowest level in order.

    Args:
        problem: how they are judged.
        nodes: a pipeline on one component above `level`.
        level: theirs.
        outer: how many copies of the pipeline there are on the levels above, innermost first.
        syncs: seconds for a minibatch of the sums of gradients of the stages around it.
    """
    together = sum if problem.form == "summed" else (lambda each: max(each, default=0.0))
    copies = math.prod(outer)
    for node in nodes:
        weights = problem.weights[node.first, node.last]
        sync = float(problem.sync_seconds(weights, node.replicas, level)) / (node.replicas * copies)
        own, by_level = (*syncs, sync), (node.replicas, *outer)
        transfer = 0.0 if node is nodes[-1] else float(problem.transfer_seconds(level)[node.last]) / copies
        if level == 0:
            compute = float(problem.compute[node.first, node.last]) / (node.replicas * copies)
            yield _Leaf(node, by_level, compute, float(together(own)), transfer, float(together(syncs)))
            continue
        *inner, last = _leaves(problem, node.inside, level - 1, by_level, own)
        yield from inner
        yield _Leaf(last.node, last.by_level, last.compute, last.sync, transfer, float(together(syncs)))
