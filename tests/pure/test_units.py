"""Stages that are gathered and reduced unit by unit, what collectives take from computations, and fitted links."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.terapipe_paper.__main__ import HERE
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules as families
from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op
from pipeloom.passes import forward_only, lower
from pipeloom.plan.cluster import parse_cluster
from pipeloom.plan.costs.links import data_links
from pipeloom.sim import Costs, Network, Timeline, measured_timeline, parse_costs, simulate
from pipeloom.sim.data_link import TimedCollective, fit_data_link, gather_seconds, reduce_seconds, slowdown
from tests.pure.test_data_axis import AXES
from tests.pure.test_schedule_properties import schedules
from tests.unit_program import unit_actions_of_rank

MICROBATCH = Granularity.MICROBATCH
ALONE = families.build("gpipe", num_ranks=1, num_microbatches=1)  # F0 B0


def axis(strategy: str = "zero3", granularity: Granularity = Granularity.STEP) -> DataAxis:
    return DataAxis(degree=2, strategy=DataStrategy(strategy), granularity=granularity)


def costs(computing: float, size: float, units: int | None, stages: int = 1) -> Costs:
    """F takes `computing`, B twice that; a stage has `size` bytes."""
    times = (computing,) * stages
    return Costs(
        forward=times,
        backward_input=times,
        backward_weight=times,
        parameter_bytes=(size,) * stages,
        units=None if units is None else (units,) * stages,
    )


def spans(timeline: Timeline, op: Op) -> list[tuple[float, float]]:
    rows = (*timeline.spans, *timeline.background)
    return [(span.start, span.end) for row in rows for span in row if span.action.op is op]


@pytest.mark.parametrize("units", [1, 3, 4])
@pytest.mark.parametrize(("gather", "layer"), [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0)])
def test_a_unit_is_gathered_while_the_one_before_it_computes(units, gather, layer):
    """Closed forms of one stage of n units: a gather takes g, as a reduction does, F of one c and B of one 2 c."""
    n, g, c = units, gather, layer
    program = lower(ALONE, data=axis("zero3", MICROBATCH))
    timeline = simulate(program, costs(n * c, 2 * n * g, n), Network(data_bytes_per_second=1.0))
    (forward,), (backward,) = spans(timeline, Op.F), spans(timeline, Op.B)
    assert forward == (g, g + (n - 1) * max(g, c) + c)
    gathers, reductions = spans(timeline, Op.UNSHARD), spans(timeline, Op.REDUCE_GRAD)
    assert (len(gathers), len(reductions)) == (2 * n, n)
    assert backward[0] == forward[1] + g
    if 2 * c >= 2 * g:  # both the gather of the next and the reduction of the last unit hide
        assert backward[1] == backward[0] + 2 * c * n
    assert timeline.makespan == reductions[-1][1] == backward[1] + g
    assert timeline.ideal_seconds == pytest.approx(3 * n * c)
    assert timeline.busy_seconds == pytest.approx((3 * n * c,))


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_reductions_start_inside_the_last_backward(strategy):
    """Four units; with gradients in shards, one reduction is on its way and the next unit waits to be computed."""
    n, c, r = 4, 1.0, 3.0
    factor = 1.0 if strategy == "ddp" else 2.0  # an all-reduce takes twice as long
    found = costs(n * c, 0.0, n)
    found = replace(found, gradient_bytes=(factor * n * r,))
    timeline = simulate(lower(ALONE, data=axis(strategy)), found, Network(data_bytes_per_second=1.0))
    ((_, end),) = spans(timeline, Op.B)
    first = n * c + 2 * c
    assert spans(timeline, Op.REDUCE_GRAD) == [(first + k * r, first + (k + 1) * r) for k in range(n)]
    assert end == (first + (n - 1) * 2 * c if strategy == "ddp" else first + (n - 1) * r)
    assert timeline.makespan == first + n * r


def test_what_is_gathered_once_is_awaited_unit_by_unit():
    timeline = simulate(lower(ALONE, data=axis("zero1")), costs(4.0, 24.0, 4), Network(data_bytes_per_second=1.0))
    assert spans(timeline, Op.F) == [(3.0, 13.0)]  # units come at 3, 6, 9, 12
    assert timeline.waits == (6.0 + 3.0,)  # F, and B of 2 s a unit for reductions of 3 s
    (measured,) = (measured_timeline(ALONE, [[*timeline.spans[0], *timeline.background[0]]], waits=timeline.waits),)
    assert (measured.makespan, measured.ideal_seconds) == (timeline.makespan, timeline.ideal_seconds)


@pytest.mark.parametrize(("lost", "longer"), [(0.0, 0.0), (0.5, 1.5), (1.0, 3.0)])
def test_computations_lose_speed_beside_collectives(lost, longer):
    """A reduction of 3 s is begun with the second of two backwards of 8 s."""
    schedule = families.build("gpipe", num_ranks=1, num_microbatches=2)
    program = lower(schedule, data=axis("zero2", MICROBATCH))
    network = Network(data_bytes_per_second=1.0, data_slowdown=lost)
    for units in (None, 1):
        timeline = simulate(program, costs(4.0, 6.0, units), network)
        assert spans(timeline, Op.B) == [(11.0, 19.0), (19.0, 27.0 + longer)]


@given(schedules(), st.sampled_from(AXES), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_units_are_never_slower_than_whole_stages_nor_quicker_than_what_has_to_be_done(schedule, data, seed):
    rng = random.Random(seed)
    stages = schedule.num_stages
    sizes = tuple(float(rng.randrange(8)) for _ in range(stages))
    whole = replace(costs(1.0, 0.0, None, stages), parameter_bytes=sizes)
    network = Network(data_bytes_per_second=2.0)
    if data.strategy.shards_optimizer and rng.randrange(2):
        schedule = forward_only(schedule)
    program = lower(schedule, data=data)
    plain = simulate(lower(schedule), whole)
    gathered_whole = simulate(program, replace(whole, units=(1,) * stages), network)
    counts = tuple(rng.randrange(1, 5) for _ in range(stages))
    timeline = simulate(program, replace(whole, units=counts), network)
    # Where reductions are one at a time, backwards wait for them inside, and other ranks for those backwards. And one
    # unit ahead is less than the whole stage that a rank could gather while it waits for a message.
    waits = data.strategy.shards_parameters and data.granularity is MICROBATCH and schedule.num_ranks > 1
    if not (schedule.overlapped or waits) and (schedule.forward_only or not data.strategy.shards_optimizer):
        assert timeline.makespan <= gathered_whole.makespan * (1 + 1e-9)
    assert timeline.makespan >= plain.makespan * (1 - 1e-9)
    busy = [sum(end - start for _, start, end in row) for row in timeline.background]
    assert timeline.makespan >= max(busy) - 1e-9
    assert busy == pytest.approx([sum(end - start for _, start, end in row) for row in gathered_whole.background])
    assert timeline.ideal_seconds == pytest.approx(plain.ideal_seconds)
    assert all(before.end <= after.start + 1e-9 for row in timeline.background for before, after in pairwise(row))
    assert Timeline.from_json(timeline.to_json()) == timeline
    slowed = simulate(program, replace(whole, units=counts), replace(network, data_slowdown=0.5))
    assert slowed.makespan >= timeline.makespan * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(schedules(), st.sampled_from(AXES), st.integers(1, 4))
def test_the_simulator_gathers_and_reduces_units_as_the_program_says(schedule, data, units):
    program = lower(schedule, data=data)
    timed = simulate(program, costs(1.0, 1.0, units, schedule.num_stages), Network(data_bytes_per_second=1.0))
    for rank, order in enumerate(program.orders):
        stages = {action.stage for action in order}
        layers = {stage: [[unit] for unit in range(units)] for stage in stages}
        said = unit_actions_of_rank(program, rank, layers, dict.fromkeys(stages, units))
        sent = [(during, unit.op) for during, unit in said if unit.op is not Op.RESHARD]
        named = [Action(a.stage, op) if op is Op.UNSHARD else a.with_op(op) for a, op in sent]
        assert [span.action for span in timed.background[rank]] == named


@pytest.mark.parametrize("strategy", list(DataStrategy))
@pytest.mark.parametrize("degree", [2, 4])
def test_a_link_is_found_again_from_what_its_collectives_take(strategy, degree):
    data = DataAxis(degree=degree, strategy=strategy)
    network = Network(data_bytes_per_second=8.0, data_sum_bytes_per_second=5.0, data_latency_seconds=0.25)
    forms = {Op.UNSHARD: gather_seconds, Op.REDUCE_GRAD: reduce_seconds}
    timed = [
        TimedCollective(op, size, seconds, 0.0)
        for op, form in forms.items()
        for size in (64, 4096)
        if (seconds := form(data, size, network))
    ]
    link = fit_data_link(data, timed, 0.5)
    assert link.sum_bytes_per_second == pytest.approx(5.0)
    assert link.bytes_per_second == (None if strategy == "ddp" else pytest.approx(8.0))
    assert link.latency_seconds == pytest.approx(0.25)
    assert replace(network, **link.network()).data_slowdown == 0.5


def test_computations_lose_the_cores_that_collectives_take():
    assert slowdown(computing=4, collectives=2, cores=2) == 1.0
    assert slowdown(computing=4, collectives=0.5, cores=2) == 0.25
    assert slowdown(computing=4, collectives=2, cores=8) == 0.0
    assert slowdown(computing=4, collectives=2, cores=5) == 0.25


def test_files_and_options_say_the_same(tmp_path, capsys):
    stage = {"forward": 4, "backward_input": 4, "backward_weight": 4, "parameter_bytes": 6, "units": 3}
    text = {"stages": [stage], "data_bytes_per_second": 1, "data_sum_bytes_per_second": 0.5, "data_slowdown": 0.5}
    file = parse_costs(json.dumps(text))
    assert file.costs.units == (3,)
    network = Network(data_bytes_per_second=1.0, data_sum_bytes_per_second=0.5, data_slowdown=0.5)
    assert file.network == network
    (tmp_path / "costs.json").write_text(json.dumps(text))
    words = ["simulate", "gpipe", "--ranks=1", "--microbatches=2", "--data=2", "--data-strategy=zero3", "--json"]
    times = ["--forward=4", "--backward-input=4", "--backward-weight=4", "--parameter-bytes=6", "--units=3"]
    links = ["--data-bandwidth=1", "--data-sum-bandwidth=0.5", "--data-slowdown=0.5"]
    answers = []
    for more in ([f"--costs={tmp_path / 'costs.json'}"], [*times, *links]):
        assert main([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    for given_words, named in (
        (["--units=0"], "--units 0"),
        (["--data-slowdown=2"], "data_slowdown=2.0"),
        (
            ["--units=2", f"--costs={tmp_path / 'costs.json'}"],
            "--units: does not work with --costs, whose file has a value for every stage. Remove --units, or",
        ),
        ([f"--cluster={tmp_path / 'costs.json'}"], "cluster"),
    ):
        assert main([*words, *given_words]) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1
    with pytest.raises(InputError, match=r"the costs file: stages\[0\].units=1\.5: must be an integer >= 1"):
        parse_costs(json.dumps(text | {"stages": [stage | {"units": 1.5}]}))


def test_a_cluster_file_says_what_goes_beside_ranks(tmp_path, capsys):
    data = json.loads((HERE / "p3.16xlarge.json").read_text())
    data["device"]["host_bytes_per_second"] = 16e9
    cluster = parse_cluster(json.dumps(data))
    inside = data_links(cluster, stride=4, replicas=2)
    assert inside["data_bytes_per_second"] == cluster.efficiency * 25e9  # between two devices
    between = data_links(cluster, stride=4, replicas=4)  # four devices share the network of a node
    assert between["data_bytes_per_second"] == cluster.efficiency * 3.125e9 / 4
    assert between["data_sum_bytes_per_second"] == 1.875e9 / 4
    assert between["data_latency_seconds"] == 5e-5
    assert between["memory_bytes_per_second"] == cluster.efficiency * 16e9
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    words = ["simulate", "gpipe", "--ranks=4", "--microbatches=2", f"--cluster={tmp_path / 'cluster.json'}"]
    size = 1e9
    assert main([*words, "--data=4", f"--parameter-bytes={size}", "--json"]) == 0
    expected = 2 * (3 / 4 * size / (1.875e9 / 4) + 3 * 5e-5)
    assert json.loads(capsys.readouterr().out)["data_link_seconds"] == pytest.approx([expected] * 4)
    assert main(words) == 2
    assert "--cluster has no effect without --data, --offload or --model." in capsys.readouterr().err
