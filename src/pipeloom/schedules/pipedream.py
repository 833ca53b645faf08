"""PipeDream: 1F1B without a flush (Narayanan et al., SOSP 2019, arXiv:1806.03377), and PipeDream-2BW.

Parameters are updated while micro-batches are in flight. The weight policy defines which version each micro-batch uses
(`pipeloom.ir.versions`). PipeDream updates after every micro-batch, 2BW after m micro-batches.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 0F5 0B3 ... 0B4 ... 0B5
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 ... 1B5 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...

The order is 1F1B's; a stage updates directly after the last B of an update.

Stage s on r_s replicas (1F1B-RR) runs micro-batch b on replica ``b mod r_s``. ``ceil(sum_{u >= s} r_u / r_s)``
micro-batches are in flight on each of its replicas (NOAM at the input stage), with equally many parameter versions.
In steady state a micro-batch takes ``max_s (F_s + B_s) / r_s``: there is no bubble. 2BW needs only two versions if
``m >= p - 1``; with replicas, if each runs at least its in-flight number of micro-batches per update,
``lcm(m, r_s) / r_s``.
"""

from collections.abc import Sequence
from itertools import count
from math import lcm
from typing import Literal

from pipeloom.errors import ScheduleError
from pipeloom.ir import Placement, Schedule, WeightPolicy
from pipeloom.ir.check.schedule_rules import UPDATE_RULES
from pipeloom.schedules.replicated import noam_in_flight, replica_counts, replicated_orders
from pipeloom.schedules.sizes import check_size
from pipeloom.schedules.table import family


@family(
    "pipedream",
    paper="PipeDream, SOSP 2019, arXiv:1806.03377",
    constraints="asynchronous, bubble-free in steady state; any p >= 1, m >= 1; m % (replicas of each stage) == 0",
    bubble="(p-1)/(m+p-1)",
    peak="min(p-d, m)",
    stream=("weights", "replicas", "microbatches_per_update", "in_flight"),
)
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
        num_ranks: ranks of all stages and replicas.
        num_microbatches: micro-batches of the whole stream, warm-up and cool-down included.
        microbatches_per_update: micro-batches per update of a stage; replicas of a stage run an equal number each.
        weights: "stash": every stage uses its newest version; "vertical": the version that corresponds to the input
            stage's version when the micro-batch entered.
        replicas: ranks of each stage; default 1.
        in_flight: in-flight micro-batches per replica of a stage. "noam" (default): ``ceil(sum_{u >= s} r_u / r_s)``
            as in the paper; "full": enough to reach the slowest stage's period for any work of the other stages, see
            `full_in_flight`; a number, at least NOAM: for the input stage, with NOAM on the others.

    Raises:
        ScheduleError: inconsistent sizes.
    """
    if weights not in ("stash", "vertical"):
        raise ScheduleError(f"weights={weights!r}: must be 'stash' or 'vertical' for schedule 'pipedream'.")
    counts = replica_counts(num_ranks, replicas)
    warmups = _warmups(counts, in_flight)
    return _stream("pipedream", num_microbatches, microbatches_per_update, WeightPolicy(weights), counts, warmups)


@family(
    "pipedream-2bw",
    paper="PipeDream-2BW, arXiv:2006.09503",
    constraints="asynchronous, bubble-free in steady state; n >= p-1 micro-batches per update (default p), m % n == 0",
    bubble="(p-1)/(m+p-1)",
    peak="min(p-d, m)",
    stream=("replicas", "microbatches_per_update", "in_flight"),
)
def pipedream_2bw(
    *,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int | None = None,
    replicas: Sequence[int] | None = None,
    in_flight: int | str | None = None,
) -> Schedule:
    """PipeDream-2BW (arXiv:2006.09503): at most two versions per rank, a delay of exactly one update on every stage.

    Args:
        num_ranks, num_microbatches, replicas, in_flight: as for `pipedream`.
        microbatches_per_update: m of the paper, at least the number of stages - 1; default: the number of stages, or
            with replicas the next number for which two versions are enough.

    Raises:
        ScheduleError: inconsistent sizes.
    """
    counts = replica_counts(num_ranks, replicas)
    warmups = _warmups(counts, in_flight)

    def enough(each: int) -> bool:
        """Whether batch k enters no stage before update k-1; one with replicas updates one micro-batch later."""
        return all(lcm(each, r) // r >= forwards + (r > 1) for r, forwards in zip(counts, warmups, strict=True))

    if microbatches_per_update is None:
        microbatches_per_update = next(filter(enough, count(len(counts))))
    check_size("micro-batches per update", microbatches_per_update)
    if not enough(microbatches_per_update):
        raise ScheduleError(
            f"microbatches_per_update={microbatches_per_update}: the two versions of schedule 'pipedream-2bw' are too "
            f"few for the in-flight micro-batches on replicas {counts}. "
            f"Use {next(filter(enough, count(microbatches_per_update)))}."
        )
    return _stream(
        "pipedream-2bw", num_microbatches, microbatches_per_update, WeightPolicy.DOUBLE_BUFFER, counts, warmups
    )


def _warmups(counts: Sequence[int], in_flight: int | str | None) -> list[int]:
    """For each stage, the warm-up forwards of one replica. Raises ScheduleError for an invalid `in_flight`."""
    noam = noam_in_flight(counts)
    if in_flight is None or isinstance(in_flight, str):
        if in_flight not in (None, "noam", "full"):
            raise ScheduleError(f"in_flight={in_flight!r}: must be noam, full, or a number of micro-batches.")
        return [number - 1 for number in (full_in_flight(counts) if in_flight == "full" else noam)]
    check_size("in flight", in_flight)
    if in_flight < noam[0]:
        raise ScheduleError(
            f"in_flight={in_flight}: replicas {list(counts)} need at least {noam[0]} to be busy. Use {noam[0]}."
        )
    return [in_flight - 1, *(number - 1 for number in noam[1:])]


def full_in_flight(counts: Sequence[int]) -> list[int]:
    """In-flight micro-batches per replica of each stage with which no stage waits in steady state.

    Assume that every stage is as slow as the slowest: a micro-batch takes r periods on a stage with r ranks. Its
    backward can start once the next stage, with n' micro-batches in flight on r' ranks, has ended it: ``n' r'``
    periods later. Until then a replica needs ``ceil(n' r' / r)`` more micro-batches:

        n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s),  1 on the last stage

    NOAM rounds once, over the whole sum. It is equal without replicas, but smaller for replicas (1, 2, 1).
    """
    found = [1]
    for before, behind in zip(reversed(counts[:-1]), reversed(counts[1:]), strict=True):
        found.append(1 - (-found[-1] * behind // before))
    return found[::-1]


def steady_length(
    replicas: Sequence[int], *, microbatches_per_update: int = 1, in_flight: int | str | None = None
) -> int:
    """The fewest micro-batches with which `pipedream` and `pipedream_2bw` reach a steady state.

    `pipeloom.Stream` repeats the steady state of such a stream for any length. A stage on r ranks with n micro-batches
    in flight is full once (n - 1) r micro-batches have entered. Two equal updates of all stages follow.

    Args:
        replicas: ranks of each stage.
        microbatches_per_update, in_flight: as for `pipedream`.

    Raises:
        ScheduleError: arguments that `pipedream` does not support.
    """
    counts = replica_counts(sum(replicas), replicas)
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
    schedule = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        microbatches_per_update=microbatches_per_update,
        placement=Placement.replicated(counts),
        weights=weights,
        orders=replicated_orders(num_microbatches, counts, warmups),
    )
    for rule in UPDATE_RULES:
        rule.ask(schedule)
    return schedule
