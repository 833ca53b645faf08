"""DAPPLE's planner (arXiv:2007.01045): stages with replicas for synchronous 1F1B, by the latency of a pivot stage.

Where every stage runs 1F1B and then all-reduces its gradients over its replicas, a step of M micro-batches takes

    warm-up   sum of F_s over s <= Q
    steady    (M - 1) (F_Q + B_Q)
    end       max over s of  AR_s + (sum of B_a over a = s..Q if s <= Q, else  - sum of B_a over a = Q..s)

seconds. A stage on r ranks splits every micro-batch among them; in PipeDream, a replica takes full ones. F_s and B_s
are the times of its layers divided by r, and AR_s = 2 (r - 1) W / (r B) is the ring all-reduce of W bytes of weights. A
transfer between stages counts as one more stage. Its forward and its backward each take the output's bytes divided by B
and by the smaller number of replicas.

The paper chooses one pivot Q: the last stage, or an earlier one whose steady phase is longer than the current pivot's
plus all F + B between them. Without reductions, the formula is a lower bound of a step for every pivot. So the largest
of these bounds is the tightest, and minimising it finds better partitions. It is the default here; `published` selects
the paper's pivot.

The search is the paper's. Each state plans the first layers on some of the ranks and puts the remaining layers into one
stage on the remaining ranks. The fastest partition per state is kept, and its last stage is cut in all ways. The result
is good, but not always optimal. The paper's three placements of a stage on nodes are equal here, because all ranks have
the same links.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pipeloom.errors import InputError, folded
from pipeloom.ir.schedule import Schedule
from pipeloom.plan.partition.problem import Array, Problem
from pipeloom.plan.partition.profile import MOST, Profile
from pipeloom.sim import Costs, Link, Network, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousPartition:
    """Stages for a synchronous step.

    Attributes:
        stages: (first layer, last layer, replicas) per stage; layers from 0, both inclusive.
        num_microbatches: micro-batches per step.
        step_seconds: the formula's time. Without reductions, no simulated step is shorter.
        forward_seconds, backward_seconds: per stage and micro-batch.
        reduce_seconds: gradient all-reduce per stage and step.
        transfer_seconds: between neighbours, per micro-batch and direction; shape (stages - 1,).
    """

    stages: tuple[tuple[int, int, int], ...]
    num_microbatches: int
    step_seconds: float
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]

    def simulate(self, family: Callable[..., Schedule]) -> float:
        """Seconds per step under a schedule with one stage per rank, such as `one_f_one_b` or `dapple_pb`.

        Both directions share a link, as in the formula. Each stage reduces after its last backward.
        """
        count = len(self.stages)
        half = tuple(seconds / 2 for seconds in self.backward_seconds)
        costs = Costs(
            forward=self.forward_seconds,
            backward_input=half,
            backward_weight=half,
            message_bytes=(*self.transfer_seconds, 0.0),  # over links of 1 byte per second
        )
        pairs = (frozenset({(d, d + 1), (d + 1, d)}) for d in range(count - 1))
        network = Network(links=tuple(Link(ranks=pair, bytes_per_second=1.0) for pair in pairs))
        schedule = family(num_ranks=count, num_microbatches=self.num_microbatches)
        ends = (row[-1].end for row in simulate(schedule, costs, network).spans)
        return max(end + seconds for end, seconds in zip(ends, self.reduce_seconds, strict=True))


def pivot_seconds(
    forward: Sequence[Any],
    backward: Sequence[Any],
    reduce: Sequence[Any],
    *,
    num_microbatches: int,
    published: bool = False,
) -> Array:
    """The formula of this module; the times are numbers, or arrays that broadcast together.

    Args:
        forward, backward: F and B of each stage.
        reduce: AR of each stage.
        num_microbatches: M.
        published: use the paper's pivot, not the one with the longest step.

    Returns:
        Seconds per step, in the broadcast shape.
    """
    steady = [(num_microbatches - 1) * (f + b) for f, b in zip(forward, backward, strict=True)]
    behind = [np.asarray(-np.inf)]  # per stage, from the last: the largest AR behind it minus the sum of B up to there
    through = list(accumulate(backward, initial=0.0))
    for seconds, passed in zip(reduce[:0:-1], through[:1:-1], strict=True):
        behind.append(np.maximum(behind[-1], seconds - passed))
    warm_up: Any = 0.0
    before: Any = -np.inf
    says = []
    for s, longest in enumerate(steady):
        warm_up = warm_up + forward[s]
        before = np.maximum(before, reduce[s] - through[s])
        end = np.maximum(through[s + 1] + before, through[s] + behind[-1 - s])
        says.append(np.asarray(warm_up + longest + end, dtype=np.float64))
    chosen, busiest, between = says[-1], steady[-1], np.asarray(0.0)
    for s in range(len(says) - 2, -1, -1):
        if not published:
            chosen = np.maximum(chosen, says[s])
            continue
        better = steady[s] > busiest + between
        chosen, busiest = np.where(better, says[s], chosen), np.where(better, steady[s], busiest)
        between = np.where(better, 0.0, between + forward[s] + backward[s])
    return np.asarray(chosen)


class _Times:
    """F, B and AR of stages and of transfers between them."""

    def __init__(self, profile: Profile, ranks: int, bandwidth: float, context: int) -> None:
        self._problem = Problem(profile, [(ranks, bandwidth)])  # checks the numbers
        self._bandwidth, self._context = bandwidth, context
        self._forward = np.array(list(accumulate((each.forward_seconds for each in profile.layers), initial=0.0)))
        self._backward = np.array(list(accumulate((each.backward_seconds for each in profile.layers), initial=0.0)))

    def stage(self, first: Any, end: Any, replicas: Any) -> tuple[Any, Any, Any]:
        """F, B and AR of layers first..end-1."""
        weights, members = self._problem.weights[first, np.asarray(end) - 1], replicas * self._context
        return (
            (self._forward[end] - self._forward[first]) / replicas,
            (self._backward[end] - self._backward[first]) / replicas,
            2 * (members - 1) * weights / (members * self._bandwidth),
        )

    def rows(self, stages: Sequence[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, ...]]:
        """F, B and AR of stages (first, end, replicas) in a row, with the transfers between them."""
        rows = [self.stage(*stages[0])]
        for before, stage in pairwise(stages):
            rate = self._bandwidth * np.minimum(before[2], stage[2])
            seconds = self._problem.outputs[np.asarray(stage[0]) - 1] / rate
            rows += (seconds, seconds, 0.0), self.stage(*stage)
        return zip(*rows, strict=True)


def partition_synchronous(
    profile: Profile,
    *,
    ranks: int,
    bandwidth: float,
    num_microbatches: int,
    published: bool = False,
    context: int = 1,
) -> SynchronousPartition:
    """Stages with replicas for a synchronous step of 1F1B.

    Args:
        profile: of one micro-batch.
        ranks: number of ranks; all are used.
        bandwidth: bytes per second per rank.
        num_microbatches: micro-batches per step.
        published: judge partitions by the paper's pivot.
        context: context-parallel degree of each rank: so many processes of each replica reduce the gradients.

    Raises:
        InputError: a number out of range.
    """
    if not 1 <= num_microbatches <= MOST:
        rule = f"at most {MOST:g}" if num_microbatches > MOST else "at least 1"
        raise InputError(f"num_microbatches={folded(num_microbatches)}: must be {rule}.")
    times = _Times(profile, ranks, bandwidth, context)
    judge = partial(pivot_seconds, num_microbatches=num_microbatches, published=published)
    num_layers = len(profile.layers)
    latency = np.full((num_layers, ranks), np.inf)  # of partitions whose first j layers are planned on m ranks
    parent = np.zeros((num_layers, ranks, 2), dtype=np.int64)
    latency[0, 0] = judge(*times.rows([(0, num_layers, ranks)]))
    for layers in range(num_layers - 1):
        for used in range(ranks - 1):
            if not math.isfinite(latency[layers, used]):
                continue
            planned = _planned(parent, layers, used)
            end = np.arange(layers + 1, num_layers)[:, None]
            replicas = np.arange(1, ranks - used)[None, :]
            rest = (end, np.asarray(num_layers), ranks - used - replicas)
            found = judge(*times.rows([*planned, (np.asarray(layers), end, replicas), rest]))
            target = latency[layers + 1 :, used + 1 :]
            better = found < target
            target[better] = found[better]
            parent[layers + 1 :, used + 1 :][better] = layers, used
    layers, used = divmod(int(np.argmin(latency)), ranks)
    stages = [*_planned(parent, layers, used), (layers, num_layers, ranks - used)]
    forward, backward, reduce = times.rows(stages)
    return SynchronousPartition(
        stages=tuple((first, end - 1, replicas) for first, end, replicas in stages),
        num_microbatches=num_microbatches,
        step_seconds=float(latency.min()),
        forward_seconds=tuple(float(each) for each in forward[::2]),
        backward_seconds=tuple(float(each) for each in backward[::2]),
        reduce_seconds=tuple(float(each) for each in reduce[::2]),
        transfer_seconds=tuple(float(each) for each in forward[1::2]),
    )


def _planned(parent: Any, layers: int, used: int) -> list[tuple[int, int, int]]:
    """The stages (first, end, replicas) of the partition kept for this state."""
    stages = []
    while layers:
        first, before = (int(each) for each in parent[layers, used])
        stages.append((first, layers, used - before))
        layers, used = first, before
    return stages[::-1]
