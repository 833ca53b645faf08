"""Which version each micro-batch uses, and what ranks hold: PipeDream, 1F1B-RR and 2BW against their papers."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import ceil, lcm

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule, WeightPolicy, check
from pipeloom.ir.versions import num_updates, versions_used, weight_version_bytes, with_updates
from pipeloom.passes import lower
from pipeloom.schedules import build, pipedream, pipedream_2bw

VECTORS = ((1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 1, 1), (2, 2), (3, 1), (4, 2, 1), (1, 2, 1), (2, 3, 1), (1, 3))


def stream(kind: str, replicas: tuple[int, ...], updates: int, each: int = 1, in_flight: int | None = None) -> Schedule:
    """`kind` is stash, vertical or 2bw; long enough for `updates` updates of all stages."""
    options = {"replicas": replicas, "microbatches_per_update": each, "in_flight": in_flight}
    sizes = {"num_ranks": sum(replicas), "num_microbatches": lcm(each, *replicas) * updates}
    return pipedream_2bw(**sizes, **options) if kind == "2bw" else pipedream(**sizes, **options, weights=kind)


def newest_by_counting(stage: int, b: int, replicas: tuple[int, ...], each: int, in_flight: int | None = None) -> int:
    """How many updates a stage has made when F of micro-batch b begins: from its backwards before, counted."""
    ranks = replicas[stage]
    forwards_first = ceil(sum(replicas[stage:]) / ranks) if stage or in_flight is None else in_flight
    backwards = max(0, b // ranks - (forwards_first - 1))
    a_replicas_share = lcm(each, ranks) // ranks
    late = ranks > 1  # the gradients of the other replicas come while one more micro-batch runs
    return max(0, backwards - late) // a_replicas_share


def fewest_2bw(replicas: tuple[int, ...], least: int) -> int:
    """From `least` on, the first number of micro-batches an update with which each finds its version there: counted."""
    return next(
        each
        for each in count(least)
        if all(
            b // lcm(each, ranks) - 1 <= newest_by_counting(stage, b, replicas, each)
            for stage, ranks in enumerate(replicas)
            for b in range(5 * lcm(each, *replicas))
        )
    )


def usual_2bw(replicas: tuple[int, ...], updates: int) -> Schedule:
    """2BW with the number of micro-batches an update that it takes by itself."""
    each = fewest_2bw(replicas, len(replicas))
    sizes = {"num_ranks": sum(replicas), "num_microbatches": lcm(each, *replicas) * updates}
    return pipedream_2bw(**sizes, replicas=replicas)


# --- what is in flight, and which versions ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", VECTORS)
def test_as_many_are_in_flight_as_pipedream_says(replicas):
    for updates in (1, 2, 9):
        schedule = stream("stash", replicas, updates)
        said = []
        for stage, ranks in enumerate(replicas):
            own = schedule.num_microbatches // ranks
            said += [min(ceil(sum(replicas[stage:]) / ranks), own)] * ranks
        assert check(schedule).live_activations == check(lower(schedule)).live_activations == tuple(said)


@pytest.mark.parametrize("p", range(2, 9))
def test_versions_lag_and_are_held_as_the_papers_say(p):
    for m in (2 * p - 1, 3 * p):
        stash, vertical = (check(stream(kind, (1,) * p, m)) for kind in ("stash", "vertical"))
        assert stash.weight_versions == tuple(p - d for d in range(p))
        assert vertical.weight_versions == (p,) * p
    assert check(stream("vertical", (1,) * p, 1)).weight_versions == (1,) * p
    for b in range(3 * p):  # newest is version b when B of micro-batch b begins
        for d in range(p):
            lags = [b - versions_used(stream(kind, (1,) * p, 3 * p))[d, b] for kind in ("stash", "vertical")]
            assert lags == [min(b, p - 1 - d), min(b, p - 1)]


@pytest.mark.parametrize("p", range(2, 9))
def test_two_buffers_are_enough_from_p_minus_1_micro_batches_on(p):
    for each in range(1, p - 1):
        with pytest.raises(ScheduleError, match=f"too few for the in-flight micro-batches .*Use {p - 1}.$"):
            stream("2bw", (1,) * p, 4, each)
        slow = replace(stream("stash", (1,) * p, 4, each), weights=WeightPolicy.DOUBLE_BUFFER)
        with pytest.raises(
            ScheduleError, match=r"comes before the update that makes it\. Increase microbatches_per_update="
        ):
            check(slow)
    for each in (p - 1, p, 2 * p + 1):
        schedule = stream("2bw", (1,) * p, 5, each)
        assert check(schedule).weight_versions == (2,) * p
        assert all(version == max(b // each - 1, 0) for (_, b), version in versions_used(schedule).items())


@pytest.mark.parametrize("replicas", VECTORS)
@pytest.mark.parametrize("more", [None, 1, 3])
def test_every_micro_batch_uses_the_version_that_counting_gives(replicas, more):
    in_flight = None if more is None else ceil(sum(replicas) / replicas[0]) + more
    stages = range(len(replicas))
    for each in (1, 2, 3, 5):
        schedules_of = {kind: stream(kind, replicas, 7, each, in_flight) for kind in ("stash", "vertical")}
        used = {kind: versions_used(schedule) for kind, schedule in schedules_of.items()}
        for b in range(schedules_of["stash"].num_microbatches):
            newest = [newest_by_counting(s, b, replicas, each, in_flight) for s in stages]
            assert [used["stash"][s, b] for s in stages] == newest
            seen = min(version * lcm(each, ranks) for version, ranks in zip(newest, replicas, strict=True))
            assert [used["vertical"][s, b] * lcm(each, replicas[s]) // lcm(each, *replicas) for s in stages] == [
                seen // lcm(each, replicas[s]) * lcm(each, replicas[s]) // lcm(each, *replicas) for s in stages
            ]
            for s in stages:  # no update between what it has and what the others have seen
                assert used["vertical"][s, b] == seen // lcm(each, replicas[s])


@pytest.mark.parametrize("replicas", VECTORS)
def test_2bw_of_replicas_takes_the_fewest_micro_batches_that_two_versions_are_enough_for(replicas):
    usual = usual_2bw(replicas, 5)
    assert usual.microbatches_per_update == fewest_2bw(replicas, len(replicas))
    for each in range(1, usual.microbatches_per_update + 2):
        enough = fewest_2bw(replicas, each)
        if enough > each:
            with pytest.raises(ScheduleError, match=f"too few for the in-flight micro-batches .*Use {enough}.$"):
                stream("2bw", replicas, 5, each)
            with pytest.raises(ScheduleError, match="comes before the update"):
                check(replace(stream("stash", replicas, 5, each), weights=WeightPolicy.DOUBLE_BUFFER))
            continue
        schedule = stream("2bw", replicas, 5, each)
        assert max(check(schedule).weight_versions) == 2  # one where an update that is made later is made in time
        for (stage, b), version in versions_used(schedule).items():
            assert version == max(b // lcm(each, replicas[stage]) - 1, 0)


def by_hand() -> list[Schedule]:
    """Streams with several stages a rank, and with split backwards."""
    made = [
        build("interleaved", num_ranks=2, num_microbatches=8, num_chunks=2),
        build("zb-h1", num_ranks=3, num_microbatches=8),
        build("zb-v", num_ranks=3, num_microbatches=8),
    ]
    policies = (WeightPolicy.STASH, WeightPolicy.VERTICAL)
    return [replace(s, weights=w, microbatches_per_update=each) for s in made for w in policies for each in (1, 2, 4)]


@pytest.mark.parametrize(
    "schedule",
    [stream(kind, v, 4, each) for v in VECTORS for kind, each in (("stash", 1), ("vertical", 2))]
    + [usual_2bw(v, 4) for v in VECTORS]
    + by_hand(),
    ids=lambda s: f"{s.name}-{s.weights}-{s.placement.replicas}-{s.microbatches_per_update}",
)
def test_versions_held_are_those_that_somebody_still_needs(schedule):
    """Action by action: what exists is the newest version of a stage and every older one that a backward will use."""
    used = versions_used(schedule)
    sizes = [3.0 + stage for stage in range(schedule.num_stages)]
    most_bytes = []
    for rank, held in enumerate(schedule.placement.stages_of):
        newest = dict.fromkeys(held, 0)
        wanted = {stage: {} for stage in held}
        for action in schedule.orders[rank]:
            if action.op is Op.F:
                wanted[action.stage][action.microbatch] = used[action.stage, action.microbatch]
        most, most_versions = sum(sizes[stage] for stage in held), 1
        for stage, op, number, _ in with_updates(schedule, rank):
            if op in (Op.B, Op.W):
                del wanted[stage][number]
            elif op is Op.STEP:
                assert number == newest[stage]
                newest[stage] += 1
                exist = {s: {newest[s], *(v for v in wanted[s].values() if v < newest[s])} for s in held}
                most = max(most, sum(sizes[s] * len(exist[s]) for s in held))
                most_versions = max(most_versions, *map(len, exist.values()))
        assert newest == {stage: num_updates(schedule, stage) for stage in held}
        assert check(schedule).weight_versions[rank] == most_versions
        most_bytes.append(most)
    assert weight_version_bytes(schedule, sizes) == pytest.approx(most_bytes)


def test_placements_of_streams_are_those_of_round_robin():
    schedule = stream("stash", (2, 1), 4)
    assert schedule.placement == Placement.replicated([2, 1])
    assert Action(0, Op.F, 3) in schedule.orders[1]
