"""Schedules of many sizes, also those of upstream's plan tests: each checks, is lowered, and simulates to its end."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, check, dependency_order
from pipeloom.passes import lower, merge_backwards
from pipeloom.report import timeline_svg, trace
from pipeloom.sim import Costs, simulate

# (chunks, micro-batches, ranks) of torch.distributed.pipelining's plan tests; the largest is for two families alone.
# `python -m benchmarks.simulator --grid` runs every size for every family.
UPSTREAM = [
    *((2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8)),
    *((4, 16, 4), (4, 32, 4), (3, 2, 2), (3, 8, 2), (3, 12, 4)),
    *((4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (2, 15, 4), (1, 1, 1), (1, 3, 5), (1, 7, 4)),
]
LARGE = [(4, 64, 4), (4, 16, 16)]  # each for a quarter of the families
LARGEST = (2, 128, 64)
COSTS = Costs(forward=1.0, backward_input=1.25, backward_weight=0.75)


def runs(name: str, chunks: int, microbatches: int, ranks: int) -> bool:
    """Whether the schedule exists; if so, it is checked, lowered, checked again and simulated both ways."""
    family = schedules.find(name)
    try:
        schedule = schedules.build(
            name,
            num_ranks=ranks,
            num_microbatches=microbatches,
            num_chunks=chunks if family.chunks is None else None,
        )
    except ScheduleError:
        return False
    checked = check(schedule)
    program = lower(schedule, tied_stages=() if family.stream else ((0, schedule.num_stages - 1),))
    assert check(program).live_activations == checked.live_activations
    direct, lowered = simulate(schedule, COSTS), simulate(program, COSTS)
    assert lowered.makespan == pytest.approx(direct.makespan, rel=1e-12)
    assert {span.action for row in lowered.spans for span in row} == {action for _, action in program.actions()}
    return True


@pytest.mark.parametrize("name", [name for name in schedules.FAMILIES if name != "search"])
def test_upstreams_plans_run_to_their_end(name):
    assert sum(runs(name, *size) for size in UPSTREAM) >= 3


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if turn % 4 == 2 * place else pytest.mark.whole_grid)
        for turn, name in enumerate(name for name in schedules.FAMILIES if name != "search")
        for place, size in enumerate(LARGE)
    ],
)
def test_large_plans_of_upstreams_run_to_their_end(name, size):
    runs(name, *size)


@pytest.mark.parametrize("name", ["interleaved", pytest.param("zb-v", marks=pytest.mark.whole_grid)])
def test_the_largest_of_upstreams_plans_runs_to_its_end(name):
    assert runs(name, *LARGEST)


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_action_of_every_schedule_is_in_the_pictures(name):
    """Also F0 on the last rank of 1F1B, and lowered programs."""
    schedule = schedules.build(name, num_ranks=2, num_microbatches=4)
    for pipeline in (schedule, merge_backwards(schedule), lower(schedule)):
        timeline = simulate(pipeline, COSTS)
        actions = {action for _, action in pipeline.actions() if action.op in (Op.F, Op.B, Op.I, Op.W)}
        assert Action(schedule.num_stages - 1, Op.F, 0) in actions
        svg = timeline_svg([timeline])
        sliced = {event["args"]["action"] for event in trace(timeline)["traceEvents"] if event["ph"] == "X"}
        for action in actions:
            assert f"<title>{action} on rank" in svg
            assert str(action) in sliced
        assert {action for _, _, action in dependency_order(pipeline)} >= actions
