"""PipeDream: 1F1B that is never flushed (Narayanan et al., SOSP 2019, arXiv:1806.03377), and PipeDream-2BW.

Micro-batches stream through; parameters change while others are in flight, and the weight policy says which version
each uses (`pipeloom.ir.versions`). One micro-batch is one update in PipeDream; in 2BW m of them are.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 0F5 0B3 ... 0B4 ... 0B5     the order is that of 1F1B;
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 ... 1B5 ...     behind every B stands an update
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...

Stage s on r_s replicas (1F1B-RR) runs micro-batch b on replica ``b mod r_s``. ``ceil(sum_{u >= s} r_u / r_s)``
micro-batches are in flight on each of its replicas (at the input stage that is NOAM), and as many versions of the
parameters exist. In the steady state a micro-batch takes ``max_s (F_s + B_s) / r_s``: there is no bubble. With 2BW
two versions are enough as long as ``m >= p - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, WeightPolicy
from pipeloom.schedules.sizes import sized


@sized
def pipedream(
    *,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int = 1,
    weights: Literal["stash", "vertical"] = "stash",
    replicas: Sequence[int] | None = None,
    num_in_flight: int | None = None,
) -> Schedule:
    """PipeDream's 1F1B, with 1F1B-RR where stages have replicas.

    Args:
        num_ranks: over all stages and replicas.
        num_microbatches: of the whole stream: start-up, steady state and drain.
        microbatches_per_update: after how many micro-batches a stage updates; a stage with replicas waits until each
            of them had its equal share.
        weights: "stash": every stage uses the newest version it has; "vertical": the one that corresponds to the input
            stage's when the micro-batch entered.
        replicas: ranks of each stage; one each if not given.
        num_in_flight: micro-batches that each replica of the input stage admits, at least NOAM, which it is if not
            given. Where every stage has as much work as its replicas can do, one more may be needed for full
            throughput, as with replicas (1, 2, 1).

    Raises:
        ScheduleError: sizes that do not fit each other.
    """
    if weights not in ("stash", "vertical"):
        raise ScheduleError(f"weights are {weights!r}: pipedream has 'stash' and 'vertical'; take one of them")
    return _stream(
        "pipedream",
        num_ranks,
        num_microbatches,
        microbatches_per_update,
        WeightPolicy(weights),
        replicas,
        num_in_flight,
    )


@sized
def pipedream_2bw(
    *,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int | None = None,
    replicas: Sequence[int] | None = None,
    num_in_flight: int | None = None,
) -> Schedule:
    """PipeDream-2BW (arXiv:2006.09503): two versions on every rank, a delay of exactly one update on every stage.

    Args:
        num_ranks, num_microbatches, replicas, num_in_flight: as for `pipedream`.
        microbatches_per_update: m of the paper, at least the number of stages less one; the number of stages if not
            given.

    Raises:
        ScheduleError: sizes that do not fit each other.
    """
    stages = num_ranks if replicas is None else len(replicas)
    count = stages if microbatches_per_update is None else microbatches_per_update
    if count < stages - 1:
        raise ScheduleError(
            f"{count} micro-batches an update on {stages} stages: pipedream-2bw keeps two versions, which is enough "
            f"from {stages - 1} micro-batches on; take more micro-batches an update"
        )
    return _stream(
        "pipedream-2bw", num_ranks, num_microbatches, count, WeightPolicy.DOUBLE_BUFFER, replicas, num_in_flight
    )


def _stream(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    count: int,
    weights: WeightPolicy,
    replicas: Sequence[int] | None,
    num_in_flight: int | None,
) -> Schedule:
    counts = [1] * num_ranks if replicas is None else list(replicas)
    if any(not hasattr(r, "__index__") or r < 1 for r in counts) or sum(counts) != num_ranks:
        raise ScheduleError(
            f"replicas {counts} on {num_ranks} ranks: every stage has at least 1, and together they are all ranks; "
            "correct one of them"
        )
    noam = -(-num_ranks // counts[0])
    if num_in_flight is not None and num_in_flight < noam:
        raise ScheduleError(
            f"{num_in_flight} micro-batches in flight: replicas {counts} need at least {noam} to be busy; raise it"
        )
    placement = Placement.replicated(counts)
    orders: list[tuple[Action, ...]] = []
    for stage, ranks in enumerate(placement.replicas):
        warmup = -(-sum(counts[stage:]) // len(ranks)) - 1
        if stage == 0 and num_in_flight is not None:
            warmup = num_in_flight - 1
        for replica in range(len(ranks)):
            mine = range(replica, num_microbatches, len(ranks))
            order = [Action(stage, Op.F, b) for b in mine[:warmup]]
            for forward, backward in zip(mine[warmup:], mine, strict=False):
                order += (Action(stage, Op.F, forward), Action(stage, Op.B, backward))
            order += (Action(stage, Op.B, b) for b in mine[max(0, len(mine) - warmup) :])
            orders.append(tuple(order))
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        microbatches_per_update=count,
        placement=placement,
        weights=weights,
        orders=tuple(orders),
    )
