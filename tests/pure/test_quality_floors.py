"""What the heuristics find on a fixed set of instances may not get worse: makespans up to, bounds down to, these."""

from __future__ import annotations

import random

import pytest

from pipeloom import schedules
from pipeloom.ir import Placement
from pipeloom.schedules import Conditions
from tests.pure.test_search import instance, simulated

EFFORT = 60_000
PLACEMENTS = {
    "loop2": (Placement.loop(2), 5),
    "loop3": (Placement.loop(3), 4),
    "loop4": (Placement.loop(4), 3),
    "chunks": (Placement.loop(2, 2), 3),
    "v2": (Placement.v(2), 4),
    "v3": (Placement.v(3), 3),
    "bidirectional": (Placement.bidirectional(2), 4),
}
LOOSENESS = (1.2, 1.8, 3.0)

# placement, looseness of the caps -> makespan and lower bound of `search`
SEARCHED: dict[tuple[str, float], tuple[float, float]] = {
    ("loop2", 1.2): (18.5317806, 18.5317806),
    ("loop2", 1.8): (15.9356389, 15.9356389),
    ("loop2", 3.0): (14.8960321, 14.8960321),
    ("loop3", 1.2): (29.5304553, 29.5304553),
    ("loop3", 1.8): (23.8108723, 23.8108723),
    ("loop3", 3.0): (14.6661795, 14.6661795),
    ("loop4", 1.2): (29.6486899, 29.6486899),
    ("loop4", 1.8): (23.9568775, 23.9568775),
    ("loop4", 3.0): (14.3832739, 14.3832739),
    ("chunks", 1.2): (29.3058519, 29.3058519),
    ("chunks", 1.8): (17.773344, 17.773344),
    ("chunks", 3.0): (19.8114862, 19.8114862),
    ("v2", 1.2): (37.0090552, 37.0090552),
    ("v2", 1.8): (23.9226428, 22.9298575),
    ("v2", 3.0): (24.838083, 24.838083),
    ("v3", 1.2): (37.3749298, 37.3749298),
    ("v3", 1.8): (27.6370862, 26.4914371),
    ("v3", 3.0): (22.4887536, 21.9464029),
    ("bidirectional", 1.2): (8.93130753, 8.77682243),
    ("bidirectional", 1.8): (8.33506918, 8.33506918),
    ("bidirectional", 3.0): (11.3143965, 11.3143965),
}

# ranks, micro-batches -> makespan of zb-auto under uneven times, links and caps
GREEDY: dict[tuple[int, int], float] = {
    (2, 1): 4.55371701,
    (2, 2): 6.43163855,
    (2, 6): 16.0275614,
    (3, 1): 7.21887136,
    (3, 3): 11.3880424,
    (3, 9): 30.9630798,
    (4, 2): 9.78416562,
    (4, 4): 14.0611136,
    (4, 12): 37.2687905,
    (6, 3): 17.7014555,
    (6, 6): 24.5614863,
    (6, 18): 62.3170115,
    (8, 4): 25.3951036,
    (8, 8): 36.301051,
    (8, 24): 98.1875896,
}


def conditions_of(placement: Placement, looseness: float) -> Conditions:
    return instance(random.Random(f"{placement.num_stages} {looseness}"), placement, looseness)


@pytest.mark.parametrize(("name", "looseness"), SEARCHED)
def test_the_search_finds_no_longer_steps_and_no_lower_bounds(name, looseness):
    placement, microbatches = PLACEMENTS[name]
    makespan, bound = SEARCHED[name, looseness]
    found = schedules.search(
        placement=placement,
        num_microbatches=microbatches,
        conditions=conditions_of(placement, looseness),
        effort=EFFORT,
    )
    assert found.makespan <= makespan * (1 + 1e-6)
    assert found.lower_bound >= bound * (1 - 1e-6)


@pytest.mark.parametrize(("p", "m"), GREEDY)
def test_zb_auto_makes_no_longer_steps(p, m):
    conditions = conditions_of(Placement.loop(p), float(p))
    schedule = schedules.zb_auto(num_ranks=p, num_microbatches=m, conditions=conditions)
    assert simulated(schedule, conditions).makespan <= GREEDY[p, m] * (1 + 1e-6)


def test_more_effort_finds_shorter_steps():
    """The effort is work that is done: with none, one generation of rules is all there is."""
    placement, _ = PLACEMENTS["v3"]
    conditions = conditions_of(placement, 3.0)
    steps = [
        schedules.search(placement=placement, num_microbatches=7, conditions=conditions, effort=effort).makespan
        for effort in (0, 60_000, 400_000)
    ]
    assert steps[0] > steps[1] > steps[2]
