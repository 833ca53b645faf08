"""A simulated step in which the peers of a lost rank compute its micro-batches."""

from __future__ import annotations

import json

import pytest

from pipeloom import schedules
from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.schedules import FAMILIES
from pipeloom.sim import Costs, Network, simulate
from pipeloom.sim.lost_rank import _Run, _Step, simulate_rerouted

SYNCHRONOUS = [name for name, family in FAMILIES.items() if not family.stream and name != "search"]
COSTS = Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0)


def built(name: str, *, num_ranks: int = 4, num_microbatches: int = 8) -> Schedule:
    return schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_peers_compute_what_the_lost_rank_had(name: str) -> None:
    schedule = built(name)
    for data, rank, split in ((2, 0, False), (3, 2, True)):
        found = simulate_rerouted(schedule, COSTS, data=data, lost=(rank, data - 1), split=split)
        work = simulate(schedule, COSTS).busy_seconds[rank]
        assert found.moved_seconds == pytest.approx(work / (data - 1))
        assert found.seconds >= work + work / (data - 1) - 1e-9
        assert found.seconds <= data * found.whole_seconds
        assert 0 <= found.in_bubbles <= 1


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_rank_without_work_is_not_missed(name: str) -> None:
    """In the fixed order, the other ranks then run as `simulate` has them, with messages that take time."""
    schedule, network = built(name), Network(latency_seconds=0.25)
    stages = schedule.placement.stages_of[1]
    seconds = [0.0 if stage in stages else 1.0 + stage / 8 for stage in range(schedule.num_stages)]
    if schedule.placement.num_stages < sum(map(len, schedule.placement.stages_of)):
        return  # a stage on two ranks has the same time on both
    costs = Costs.per_stage(forward=seconds, backward_input=seconds, backward_weight=seconds)
    found = _Run(_Step(schedule, costs, network, 2, (1, 0)), ready_first=False).finish()
    assert found is not None
    assert found[0] == pytest.approx(simulate(schedule, costs, network).makespan)


def test_steps_of_a_small_pipeline() -> None:
    """Two stages, one micro-batch in each of two replicas:

    rank 0, replicas 0 and 1    0F0             0B0          0F0'                 0B0'
    rank 1, replica 0               1F0 1F0' 1B0 1B0'
    """
    costs = Costs.uniform(forward=1.0, backward_input=0.5, backward_weight=0.5)
    schedule = built("gpipe", num_ranks=2, num_microbatches=1)
    found = simulate_rerouted(schedule, costs, data=2, lost=(1, 1))
    assert (found.whole_seconds, found.seconds, found.moved_seconds, found.in_bubbles) == (4.0, 6.0, 2.0, 0.0)
    assert (found.peak_activations, found.whole_peak_activations) == (2, 1)
    # 1I0 and 1I0' come before 1W0 and 1W0', which run while rank 0 computes 0I0' and 0W0'.
    assert simulate_rerouted(schedule, costs, data=2, lost=(1, 1), split=True).seconds == 5.0
    # Nothing is between the first and the last computation of a single stage.
    alone = simulate_rerouted(built("gpipe", num_ranks=1), costs, data=2, lost=(0, 0))
    assert alone.seconds == 2 * alone.whole_seconds


@pytest.mark.parametrize(
    ("schedule", "data", "lost", "text"),
    [
        (built("1f1b"), 1, (0, 0), "1 replica: a lost rank has no peer"),
        (built("1f1b"), 2, (4, 0), r"rank 4 of replica 0: ranks are 0\.\.3, replicas 0\.\.1"),
        (built("1f1b"), 2, (0, 2), r"rank 0 of replica 2: ranks are"),
        (schedules.build("pipedream", num_ranks=2, num_microbatches=8), 2, (0, 0), "synchronous training steps only"),
    ],
)
def test_what_cannot_be_moved_is_refused(schedule: Schedule, data: int, lost: tuple[int, int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        simulate_rerouted(schedule, COSTS, data=data, lost=lost)


def test_the_command_compares_both_ways_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "1f1b", "--ranks=4", "--microbatches=8", "--data=2"]
    assert main([*words, "--lose=2:1"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines == [
        "1f1b: without rank 2 of replica 1, its micro-batches on its peers: 54 s per step, 1.64 times that of all "
        "ranks; 12.5 % of them in bubbles; peak activations of a peer 4 in place of 2",
        "1f1b: the same with each backward as I and W: 50 s per step, 1.52 times that of all ranks; 29.2 % of them in "
        "bubbles",
        "1f1b: without replica 1, 16 micro-batches on each other one: 57 s per step, 1.73 times that of all ranks",
    ]
    assert main(["simulate", "interleaved", *words[2:], "--lose=2:1", "--data=3", "--json"]) == 0
    lost = json.loads(capsys.readouterr().out)["lost"]
    assert lost["fewer_replicas_microbatches"] == 12
    assert lost["split_seconds"] <= lost["rerouted_seconds"] < lost["fewer_replicas_seconds"]
    for more, text in ((["--lose=2"], "must be RANK:REPLICA"), (["--lose=9:1"], "ranks are 0..3")):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err
    assert main([*words[:-1], "--lose=2:1"]) == 2
    assert "has no effect without --data" in capsys.readouterr().err
