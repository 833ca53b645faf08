"""Streams of another length."""

from __future__ import annotations

import json
import math
import random
import re
import tracemalloc
from itertools import product

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir import Placement, Schedule, WeightPolicy, check
from pipeloom.ir.text import parse_orders
from pipeloom.ir.versions import versions_used
from pipeloom.passes import lower, stretch
from pipeloom.schedules import pipedream, steady_length
from pipeloom.schedules.replicated import noam_in_flight


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 1, 1), (3, 2, 1)])
def test_a_stretched_stream_is_the_one_built_at_that_length(replicas: tuple[int, ...]) -> None:
    for per_update in (1, 2, 3):
        period = math.lcm(per_update, *replicas)

        def build(periods: int, size: int = per_update, period: int = period) -> Schedule:
            sizes = {"num_ranks": sum(replicas), "replicas": replicas, "microbatches_per_update": size}
            return pipedream(num_microbatches=periods * period, **sizes)

        enough = sum(replicas) + 2
        for have, want in product((enough, enough + 3), (1, 2, enough - 1, enough, enough + 1, 3 * enough)):
            assert stretch(build(have), want * period) == build(want)


def test_a_stream_without_steady_state_is_refused() -> None:
    short = pipedream(num_ranks=4, num_microbatches=4)
    with pytest.raises(
        ScheduleError, match=r"rank 0 does not repeat its order after 1 .*\. Build it with more"
    ) as caught:
        stretch(short, 5)
    call = re.search(r"steady_length\((.*), microbatches_per_update=(\d+)\)", str(caught.value))
    enough = steady_length(json.loads(call[1]), microbatches_per_update=int(call[2]))
    check(stretch(pipedream(num_ranks=4, num_microbatches=enough), 50))
    with pytest.raises(ScheduleError, match=r"end with an update of every stage\. Use a multiple of 2\."):
        stretch(pipedream(num_ranks=3, num_microbatches=8, replicas=(2, 1)), 11)


def test_the_steady_length_is_the_shortest_that_goes_on() -> None:
    """Any replicas, any number in flight."""
    rng = random.Random(0)
    for _ in range(40):
        replicas, each = rng.choices(range(1, 4), k=rng.randint(1, 4)), rng.randint(1, 4)
        options = {
            "replicas": replicas,
            "microbatches_per_update": each,
            "in_flight": rng.choice((None, "full", noam_in_flight(replicas)[0] + rng.randint(0, 12))),
        }
        period, enough = math.lcm(each, *replicas), steady_length(**options)

        def build(length: int, options: dict = options) -> Schedule:
            return pipedream(num_ranks=sum(options["replicas"]), num_microbatches=length, **options)

        longer = build(enough + 5 * period)
        assert stretch(build(enough), enough + 5 * period) == longer
        assert stretch(build(enough + period), enough + 5 * period) == longer
        with pytest.raises(ScheduleError, match="no steady state"):
            stretch(build(enough - period), enough + 5 * period)


def test_an_irregular_order_has_its_own_length_alone() -> None:
    orders = parse_orders("0F0 0B0 0F1 0F2 0B1 0B2 0F3 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n")
    schedule = Schedule(
        name="hand",
        num_microbatches=4,
        microbatches_per_update=1,
        weights=WeightPolicy.STASH,
        placement=Placement.loop(2),
        orders=orders,
    )
    check(schedule)
    assert stretch(schedule, 4) is schedule
    assert [str(a) for a in stretch(schedule, 2).orders[0]] == ["0F0", "0B0", "0F1", "0B1"]
    with pytest.raises(ScheduleError, match="no steady state"):
        stretch(schedule, 6)


def test_a_planned_run_takes_about_a_kilobyte_for_each_micro_batch_and_stage() -> None:
    schedule, count = pipedream(num_ranks=4, num_microbatches=steady_length([1] * 4)), 250
    tracemalloc.start()
    try:
        longer = stretch(schedule, count)
        planned = lower(longer), versions_used(longer)
        assert len(planned[1]) == 4 * count
        assert 500 < tracemalloc.get_traced_memory()[0] / (4 * count) < 1500
    finally:
        tracemalloc.stop()
