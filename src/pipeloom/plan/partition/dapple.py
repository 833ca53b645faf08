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

A micro-batch of S samples is split among at most S ranks, whose largest share, ceil(S / r) of S samples, counts in
place of 1 / r (`stage_costs`). The paper's three placements of a stage on nodes are equal here, because all ranks
have the same links. Of small models the search is exact, where the paper's keeps one partition per number of layers
and ranks (`synchronous_search`). Of large ones it improves good partitions step by step (`synchronous_start`,
`synchronous_moves`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from pipeloom.errors import InputError
from pipeloom.ir.schedule import Schedule
from pipeloom.plan.partition.problem import Array
from pipeloom.plan.partition.profile import Profile
from pipeloom.plan.partition.stage_costs import StageCosts
from pipeloom.plan.partition.synchronous_moves import refined
from pipeloom.plan.partition.synchronous_search import SynchronousSearch
from pipeloom.plan.partition.synchronous_start import first_partitions, least_step_seconds
from pipeloom.sim import Costs, Link, Network, simulate

_STARTS = 3  # partitions that are improved where the search is not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousPartition:
    """Stages for a synchronous step.

    Attributes:
        stages: (first layer, last layer, replicas) per stage; positions in `order`, both inclusive.
        order: the layers of the profile stage by stage.
        num_microbatches: micro-batches per step.
        step_seconds: the formula's time. Without reductions, no simulated step is shorter.
        forward_seconds, backward_seconds: per stage and micro-batch.
        reduce_seconds: gradient all-reduce per stage and step.
        transfer_seconds: between neighbours, per micro-batch and direction; shape (stages - 1,).
        memory_bytes: memory per rank of each stage under 1F1B; a memory cap limits it.
        least_step_seconds: no partition takes less; equal to `step_seconds` where the search was exact, and 0 where
            nothing is known.
        all_cuts: whether all cuts of a graph were tried; see `pipeloom.plan.partition.cuts`.
    """

    stages: tuple[tuple[int, int, int], ...]
    num_microbatches: int
    step_seconds: float
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    least_step_seconds: float = 0.0
    all_cuts: bool = True

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


def partition_synchronous(
    profile: Profile,
    *,
    ranks: int,
    bandwidth: float,
    num_microbatches: int,
    published: bool = False,
    context: int = 1,
    memory_cap: float | None = None,
    state_copies: float = 0.0,
) -> SynchronousPartition:
    """Stages with replicas for a synchronous step of 1F1B.

    Args:
        profile: of one micro-batch; with its samples, a replica has at least one of them.
        ranks: number of ranks; all are used.
        bandwidth: bytes per second per rank.
        num_microbatches: micro-batches per step.
        published: judge partitions by the paper's pivot.
        context: context-parallel degree of each rank: so many processes of each replica reduce the gradients.
        memory_cap: maximum bytes per rank.
        state_copies: memory for gradients and optimizer states, in multiples of the weights (AdamW: 3).

    Raises:
        InputError: a number out of range, fewer samples than the ranks need, or no partition within the memory cap (the
            message has the smallest possible cap).
    """
    costs = StageCosts(
        profile,
        ranks=ranks,
        bandwidth=bandwidth,
        num_microbatches=num_microbatches,
        context=context,
        memory_cap=memory_cap,
        state_copies=state_copies,
    )
    costs.check_memory()

    def judge(stages: Sequence[tuple[Any, Any, Any]]) -> Array:
        return pivot_seconds(*costs.rows(stages), num_microbatches=num_microbatches, published=published)

    least = least_step_seconds(costs)
    starts = first_partitions(costs, least, judge, _STARTS)
    search = SynchronousSearch(costs, starts[0] if starts else None, published=published)
    stages = search.stages()
    if not stages:
        raise InputError(
            f"ranks={ranks}: no partition uses all ranks within the memory cap, with a sample for each replica. Use "
            "fewer --ranks, or raise --memory-cap."
        )
    if not search.exact:
        stages = refined([stages, *(each for _, each in starts[1:])], costs, judge)
    forward, backward, reduce = costs.rows(stages)
    held = (
        costs.memory_bytes(first, end, replicas, len(stages) - number)
        for number, (first, end, replicas) in enumerate(stages)
    )
    order, spans = costs.cuts.order([end for _, end, _ in stages])
    return SynchronousPartition(
        stages=tuple((*span, replicas) for span, (_, _, replicas) in zip(spans, stages, strict=True)),
        order=tuple(order),
        least_step_seconds=float(judge(stages)) if search.exact else 0.0 if published else least,
        all_cuts=costs.cuts.complete,
        num_microbatches=num_microbatches,
        step_seconds=float(judge(stages)),
        forward_seconds=tuple(map(float, forward[::2])),
        backward_seconds=tuple(map(float, backward[::2])),
        reduce_seconds=tuple(map(float, reduce[::2])),
        transfer_seconds=tuple(map(float, forward[1::2])),
        memory_bytes=tuple(map(float, held)),
    )
