"""PipeDream: 1F1B that is never flushed (Narayanan et al., SOSP 2019, arXiv:1806.03377), and PipeDream-2BW.

Micro-batches stream through; parameters change while others are in flight, and the weight policy says which version
each uses (`pipeloom.ir.versions`). One micro-batch is one update in PipeDream; in 2BW m of them are.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 0F5 0B3 ... 0B4 ... 0B5
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 ... 1B5 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...

The order is that of 1F1B; behind the last B of an update the stage updates at once.

Stage s on r_s replicas (1F1B-RR) runs micro-batch b on replica ``b mod r_s``. ``ceil(sum_{u >= s} r_u / r_s)``
micro-batches are in flight on each of its replicas (at the input stage that is NOAM), and as many versions of the
parameters exist. In the steady state a micro-batch takes ``max_s (F_s + B_s) / r_s``: there is no bubble. With 2BW
two versions are enough as long as ``m >= p - 1``; where a stage has replicas, as long as each of them runs at least
what it has in flight in an update, ``lcm(m, r_s) / r_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count
from math import lcm
from typing import Literal, TypedDict

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Op
from pipeloom.ir.check.checker import check_updates
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, WeightPolicy
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import check_size, sized


class StreamOptions(TypedDict, total=False):
    """What can be said of a stream beside its sizes: arguments of `pipedream` and `pipedream_2bw`; None is not said."""

    weights: str | None
    replicas: Sequence[int] | None
    microbatches_per_update: int | None
    in_flight: int | str | None


@sized
def pipedream(
    *,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int = 1,
    weights: Literal["stash", "vertical"] = "stash",
    replicas: Sequence[int] | None = None,
    in_flight: int | str | None = None,
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
        in_flight: how many micro-batches each replica of a stage admits. "noam", or not given: the paper's
            ``ceil(sum_{u >= s} r_u / r_s)``; "full": what reaches the period of the slowest stage whatever the work of
            the others, see `full_in_flight`; a number: of the input stage, at least NOAM, and NOAM on the others.

    Raises:
        ScheduleError: sizes that do not fit each other.
    """
    if weights not in ("stash", "vertical"):
        raise ScheduleError(f"weights are {weights!r}: pipedream has 'stash' and 'vertical'; take one of them")
    counts = _replicas(num_ranks, replicas)
    warmups = _warmups(counts, in_flight)
    return _stream("pipedream", num_microbatches, microbatches_per_update, WeightPolicy(weights), counts, warmups)


@sized
def pipedream_2bw(
    *,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int | None = None,
    replicas: Sequence[int] | None = None,
    in_flight: int | str | None = None,
) -> Schedule:
    """PipeDream-2BW (arXiv:2006.09503): at most two versions on a rank, a delay of exactly one update on every stage.

    Args:
        num_ranks, num_microbatches, replicas, in_flight: as for `pipedream`.
        microbatches_per_update: m of the paper, at least the number of stages less one; the number of stages if not
            given, or the next for which two versions are enough where stages have replicas.

    Raises:
        ScheduleError: sizes that do not fit each other.
    """
    counts = _replicas(num_ranks, replicas)
    warmups = _warmups(counts, in_flight)

    def enough(each: int) -> bool:
        """Whether batch k enters no stage before update k-1; one with replicas updates one micro-batch later."""
        return all(lcm(each, r) // r >= forwards + (r > 1) for r, forwards in zip(counts, warmups, strict=True))

    if microbatches_per_update is None:
        microbatches_per_update = next(filter(enough, count(len(counts))))
    check_size("micro-batches per update", microbatches_per_update)
    if not enough(microbatches_per_update):
        raise ScheduleError(
            f"{microbatches_per_update} micro-batches an update on stages of {counts} ranks: pipedream-2bw keeps two "
            f"versions, too few for what is in flight; take {next(filter(enough, count(microbatches_per_update)))}"
        )
    return _stream(
        "pipedream-2bw", num_microbatches, microbatches_per_update, WeightPolicy.DOUBLE_BUFFER, counts, warmups
    )


def _replicas(num_ranks: int, replicas: Sequence[int] | None) -> list[int]:
    """The ranks of each stage.

    Raises:
        ScheduleError: they are not all ranks.
    """
    counts = [1] * num_ranks if replicas is None else list(replicas)
    if any(not hasattr(r, "__index__") or r < 1 for r in counts) or sum(counts) != num_ranks:
        raise ScheduleError(
            f"replicas {counts} on {num_ranks} ranks: every stage has at least 1, and together they are all ranks; "
            "correct one of them"
        )
    return counts


def _warmups(counts: Sequence[int], in_flight: int | str | None) -> list[int]:
    """For each stage, the forwards of one replica before its first backward, which comes behind one more.

    Raises:
        ScheduleError: fewer in flight than keep all ranks busy, or no number.
    """
    noam = noam_in_flight(counts)
    if in_flight is None or isinstance(in_flight, str):
        if in_flight not in (None, "noam", "full"):
            raise ScheduleError(f"in flight is {in_flight!r}: it is noam, full, or a number of micro-batches")
        return [number - 1 for number in (full_in_flight(counts) if in_flight == "full" else noam)]
    check_size("in flight", in_flight)
    if in_flight < noam[0]:
        raise ScheduleError(
            f"{in_flight} micro-batches in flight: replicas {list(counts)} need at least {noam[0]} to be busy; raise it"
        )
    return [in_flight - 1, *(number - 1 for number in noam[1:])]


def noam_in_flight(counts: Sequence[int]) -> list[int]:
    """Micro-batches in flight on one replica of each stage, PipeDream's: ranks from it on over its own, upwards."""
    onwards = list(accumulate(reversed(counts)))[::-1]
    return [-(-total // ranks) for total, ranks in zip(onwards, counts, strict=True)]


def full_in_flight(counts: Sequence[int]) -> list[int]:
    """Micro-batches in flight on one replica of each stage with which no stage has to wait in the steady state.

    Let every stage be as slow as the slowest: a micro-batch of a stage on r ranks takes r periods. Its backward may
    begin when the next stage, which began it one forward later and holds n' of them on r' ranks, has ended it:
    ``n' r'`` periods after. So beside the one that it computes a replica needs ``ceil(n' r' / r)`` more:

        n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s),  1 on the last stage

    NOAM rounds once, over the whole sum, and is the same for one rank a stage, but not for replicas (1, 2, 1).
    """
    found = [1]
    for before, behind in zip(reversed(counts[:-1]), reversed(counts[1:]), strict=True):
        found.append(1 - (-found[-1] * behind // before))
    return found[::-1]


def steady_length(
    replicas: Sequence[int], *, microbatches_per_update: int = 1, in_flight: int | str | None = None
) -> int:
    """The fewest micro-batches with which `pipedream` and `pipedream_2bw` show their steady state.

    A stream of so many, or more, can be repeated for any length, which `pipeloom.Stream` does. A stage on r ranks with
    n in flight is full when (n - 1) r micro-batches have entered. Two updates of all stages follow: that they are alike
    is what shows that they repeat.

    Args:
        replicas: ranks of each stage.
        microbatches_per_update, in_flight: as for `pipedream`.

    Raises:
        ScheduleError: what `pipedream` refuses of them.
    """
    counts = _replicas(sum(replicas), replicas)
    check_size("micro-batches per update", microbatches_per_update)
    period = lcm(microbatches_per_update, *counts)
    most = max(forwards * ranks for forwards, ranks in zip(_warmups(counts, in_flight), counts, strict=True))
    return period * (-(-most // period) + 2)


def _stream(
    name: str,
    num_microbatches: int,
    microbatches_per_update: int,
    weights: WeightPolicy,
    counts: Sequence[int],
    warmups: Sequence[int],
) -> Schedule:
    check_size("micro-batches per update", microbatches_per_update)
    orders = []
    for stage, (ranks, forwards) in enumerate(zip(counts, warmups, strict=True)):
        for replica in range(ranks):
            own = len(range(replica, num_microbatches, ranks))
            warmup = min(forwards, own)
            lane = Phases(first=replica, stride=ranks)
            lane.repeat(warmup, (stage, Op.F))
            lane.repeat(own - warmup, (stage, Op.F), (stage, Op.B))
            lane.repeat(warmup, (stage, Op.B))
            orders.append(lane.order())
    schedule = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        microbatches_per_update=microbatches_per_update,
        placement=Placement.replicated(counts),
        weights=weights,
        orders=tuple(orders),
    )
    check_updates(schedule)
    return schedule
