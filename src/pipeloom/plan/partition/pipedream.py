"""PipeDream's partitioner: layers and ranks per stage, the bottleneck, and the period with limited minibatches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Literal

import numpy as np

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.plan.partition.problem import Form, Problem
from pipeloom.plan.partition.profile import Profile
from pipeloom.plan.partition.stage_search import Pipelines, StageNode
from pipeloom.schedules.pipedream import full_in_flight
from pipeloom.schedules.replicated import noam_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage with its times per minibatch and its memory.

    Attributes:
        first, last: its first and last layer, positions in the partition's `order`, both inclusive.
        replicas: ranks that hold the stage.
        replicas_by_level: replicas per level of the cluster, innermost first; `replicas` is their product.
        compute_seconds: forward and backward.
        sync_seconds: gradient all-reduces over replicas on all levels (in the published form, the longest of them).
        transfer_seconds: output to the next stage and gradient back, divided by the smaller number of replicas (in the
            published form, by none); 0 for the last stage.
        period_seconds: compute and sync together, by the form.
        in_flight: in-flight minibatches, and weight versions, with PipeDream's NOAM.
        memory_bytes: memory per rank with `in_flight` minibatches; a memory cap limits it.
        full_in_flight, full_memory_bytes: the same with enough in-flight minibatches that no stage waits.
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
    """What limits the period: compute or sync of a stage, or the transfer to the next stage."""

    kind: Literal["compute", "sync", "transfer"]
    stage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition of the layers into stages that use all ranks.

    Attributes:
        stages: in order.
        period_seconds: seconds per minibatch in the steady state.
        bottleneck: what limits the period.
        order: the layers of the profile, stage by stage; of a chain in its own order.
        fewer_ranks: (ranks, seconds) of a partition over fewer ranks with a shorter period; None if there is none, or
            for several levels.
        all_cuts: whether all cuts of a graph were tried; see `pipeloom.plan.partition.cuts`.
    """

    stages: tuple[Stage, ...]
    period_seconds: float
    bottleneck: Bottleneck
    order: tuple[int, ...]
    fewer_ranks: tuple[int, float] | None = None
    all_cuts: bool = True

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def full_memory_bytes(self) -> float:
        """Memory of the fullest rank, with enough in-flight minibatches that no stage waits."""
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
    """The partition with the shortest period; of several, one with the fewest stages.

    Args:
        profile: of one minibatch.
        levels: ``(components, bytes per second)``, innermost first. ``[(8, 1e9)]`` is 8 ranks with 1 GB/s each,
            ``[(4, 12e9), (2, 1.25e9)]`` is 2 nodes of 4 ranks. A stage uses components of one level, or part of one.
        form: how compute and sync add up, see `pipeloom.plan.partition.problem`.
        memory_cap: maximum bytes per rank.
        state_copies: memory for gradients and optimizer states, in multiples of the weights (AdamW: 3).
        replicate: whether a stage may have several ranks. If not, each rank has one stage.

    Raises:
        InputError: a number out of range, no partition within the memory cap (the message has the smallest possible
            cap), or fewer layers than ranks without replicas.
    """
    problem = Problem(profile, levels, form=form, memory_cap=memory_cap, state_copies=state_copies)
    most = None if replicate else 1
    if not replicate and problem.num_layers < problem.num_ranks:
        raise InputError(
            f"{counted(problem.num_layers, 'layer')} for {counted(problem.num_ranks, 'rank')}: without replicas each "
            "rank needs a layer. Use fewer ranks."
        )
    pipelines = Pipelines(problem, most_replicas=most)
    by_ranks = pipelines.by_ranks()
    if not math.isfinite(by_ranks[-1]):
        least = math.ceil(Pipelines(problem, memory=True, most_replicas=most).by_ranks()[-1])
        raise InputError(
            f"memory_cap={memory_cap:g}: every partition of {counted(problem.num_layers, 'layer')} over "
            f"{counted(problem.num_ranks, 'rank')} needs at least {least} bytes on some rank. Raise memory_cap "
            f"(--memory-cap) to {least}."
        )
    fewer = int(np.argmin(by_ranks))
    shorter = len(problem.levels) == 1 and replicate and by_ranks[fewer] < by_ranks[-1]
    return _judge(problem, pipelines.plan(), fewer_ranks=(fewer, float(by_ranks[fewer])) if shorter else None)


def data_parallel(
    profile: Profile, levels: Sequence[tuple[int, float]], *, form: Form = "summed", state_copies: float = 0.0
) -> Partition:
    """All layers as one stage on all ranks: data parallelism alone."""
    problem = Problem(profile, levels, form=form, state_copies=state_copies)
    nodes: tuple[StageNode, ...] = ()
    for level in problem.levels:
        nodes = (StageNode(0, problem.cuts.count - 1, level.components, nodes),)
    return _judge(problem, nodes)


def _judge(problem: Problem, nodes: Sequence[StageNode], fewer_ranks: tuple[int, float] | None = None) -> Partition:
    """The times, memory and bottleneck of a pipeline, computed from its stages alone."""
    leaves = list(_leaves(problem, nodes, len(problem.levels) - 1, (), ()))
    replicas = [math.prod(leaf.by_level) for leaf in leaves]
    noam, full = noam_in_flight(replicas), full_in_flight(replicas)
    order, spans = problem.cuts.order([leaf.node.last + 1 for leaf in leaves])
    limits, stages = [], []
    for number, leaf in enumerate(leaves):
        node, count = leaf.node, replicas[number]
        span = node.first, node.last
        held = problem.held_bytes(problem.weights[span], problem.kept[span], np.array([noam[number], full[number]]))
        own = float(problem.both(leaf.compute, leaf.sync))  # type: ignore[arg-type]
        limits.append(Bottleneck(kind="compute" if leaf.compute >= leaf.sync else "sync", stage=number, seconds=own))
        through = float(problem.both(leaf.transfer, leaf.outer_sync)) if leaf.transfer else 0.0  # type: ignore[arg-type]
        limits.append(Bottleneck(kind="transfer", stage=number, seconds=through))
        stages.append(
            Stage(
                first=spans[number][0],
                last=spans[number][1],
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
    worst = max(limits, key=lambda limit: limit.seconds)  # of equal ones the first
    return Partition(
        stages=tuple(stages),
        period_seconds=worst.seconds,
        bottleneck=worst,
        order=tuple(order),
        fewer_ranks=fewer_ranks,
        all_cuts=problem.cuts.complete,
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A stage of the lowest level: its times per minibatch, with those of the components around it."""

    node: StageNode
    by_level: tuple[int, ...]
    compute: float
    sync: float
    transfer: float  # to the next stage, on any level
    outer_sync: float  # of the components that this transfer connects


def _leaves(
    problem: Problem, nodes: Sequence[StageNode], level: int, outer: tuple[int, ...], syncs: tuple[float, ...]
) -> Iterator[_Leaf]:
    """The stages of the lowest level in order.

    `outer` has the replicas on the levels above, innermost first, and `syncs` their gradient all-reduces in seconds per
    minibatch.
    """
    together = sum if problem.form == "summed" else (lambda each: max(each, default=0.0))
    copies = math.prod(outer)
    for node, following in zip_longest(nodes, nodes[1:]):
        weights = problem.weights[node.first, node.last]
        sync = float(problem.sync_seconds(weights, node.replicas, level)) / (node.replicas * copies)
        own, by_level = (*syncs, sync), (node.replicas, *outer)
        transfer = 0.0
        if following is not None:
            fewer = min(node.replicas, following.replicas)
            transfer = float(problem.transfer_seconds(level, fewer)[node.last + 1]) / copies
        if level == 0:
            compute = float(problem.compute[node.first, node.last]) / (node.replicas * copies)
            yield _Leaf(node, by_level, compute, float(together(own)), transfer, float(together(syncs)))
            continue
        *inner, last = _leaves(problem, node.inside, level - 1, by_level, own)
        yield from inner
        yield _Leaf(last.node, last.by_level, last.compute, last.sync, transfer, float(together(syncs)))


def noam_period(found: Partition) -> float:
    """Exact seconds per minibatch in the steady state with NOAM minibatches in flight.

    It exceeds the period of the partition where NOAM is less than `Stage.full_in_flight` and stages wait for each
    other. Gradient synchronisation counts as part of the backward; transfers have no latency.
    """
    rows = [(stage.period_seconds * stage.replicas, stage.replicas, stage.in_flight) for stage in found.stages]
    busy, replicas, in_flight = zip(*rows, strict=True)
    return max(found.period_seconds, stream_period(busy, replicas=replicas, in_flight=in_flight))


def stream_period(busy: Sequence[float], *, replicas: Sequence[int], in_flight: Sequence[int]) -> float:
    """Seconds per micro-batch in the steady state of 1F1B without a flush, without messages.

    It is the largest ratio of time to micro-batches over the cycles of the dependency graph. Forward b of stage s waits
    for forward b of stage s - 1 and, on its replica, for backward ``b - n_s r_s`` (n_s in flight on each of r_s
    replicas). Backward b waits for backward b of stage s + 1 and, on its replica, for forward ``b + (n_s - 1) r_s``.
    The dependencies repeat for every b, so a simple cycle goes forward over the stages s..t and backward again:

        max over s <= t of  sum of (F_k + B_k) over k = s..t  /  (n_s r_s - (n_t - 1) r_t)

    (the maximum cycle ratio of a timed event graph: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity,
    1992). With s = t it is the time of one stage that never waits.

    Args:
        busy: seconds of a forward and a backward on one replica, per stage.
        replicas: replicas per stage; micro-batch b runs on replica ``b mod r``.
        in_flight: in-flight micro-batches per replica of each stage: `noam_in_flight` or `full_in_flight`.
    """
    longest = 0.0
    for first in range(len(busy)):
        for last, around in enumerate(accumulate(busy[first:]), first):
            micro_batches = in_flight[first] * replicas[first] - (in_flight[last] - 1) * replicas[last]
            longest = max(longest, around / micro_batches)
    return longest
