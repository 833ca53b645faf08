"""Predictions for this machine: first micro-batches, tied tables, and corrections by reference steps."""

import json
import random
from dataclasses import replace

import pytest

from pipeloom.errors import PipeloomError
from pipeloom.ir.data_axis import DataStrategy
from pipeloom.models import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.costs.step_bound import step_bound
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes, mean_layers
from pipeloom.plan.local.references import References, Shape, reference_shapes
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.space import Space
from tests.pure.test_local_machine import GIGA, machine, model, rates
from tests.pure.test_plan_bounds import some

FP32 = Precision("fp32")


def layers(forward):
    return LayerSeconds((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), {False: (forward, 1.0, 1.0)})


@pytest.mark.parametrize(("microbatches", "expected"), [(1, 5.0), (4, (5 + 3 * 1) / 4)])
def test_the_first_microbatch_of_a_step_counts_once(microbatches, expected):
    times = LayerTimes(element=4, rows={1: layers(1.0)}, firsts={1: layers(5.0)})
    costs = CostModel(model=model(), cluster=machine(), measured=times)
    (seconds,) = costs.stage_seconds(Configuration(microbatches=microbatches, precision=FP32))
    assert seconds.forward == pytest.approx(4 * expected)
    assert LayerTimes.from_mapping(json.loads(json.dumps(times.to_mapping()))) == times
    assert mean_layers([times, times]) == times
    assert times.scaled(2.0, 1.0, 1.0).firsts[1].blocks[False] == (10.0, 1.0, 1.0)


def test_ranks_exchange_the_gradients_of_a_tied_table():
    one, two = (Configuration(pipeline=ranks, microbatches=2, precision=FP32) for ranks in (1, 2))
    seconds = {}
    for tied in (False, True):
        costs = CostModel(model=replace(model(), tie_embeddings=tied), cluster=machine())
        seconds[tied] = [costs.shared_sum_seconds(of, costs.program(of).placement) for of in (one, two)]
    size = 4 * 256 * 64  # bytes; 1 ns each: a message, and reading two and writing one
    assert seconds == {False: [0.0, 0.0], True: [0.0, pytest.approx(4e-9 * size + 1e-5)]}


def test_on_a_cluster_they_exchange_them_over_the_link_between_stages():
    cluster = replace(CLUSTERS["dgx-a100-80"], devices_per_node=1)
    of = Configuration(pipeline=2, microbatches=2)
    for tied in (False, True):
        costs = CostModel(model=replace(model(), tie_embeddings=tied), cluster=cluster)
        network, seconds = costs.network(of), costs.shared_sum_seconds(of, costs.program(of).placement)
        rates = [network.bytes_per_second, *(link.bytes_per_second for link in network.links)]
        latency, size = network.latency(2)[0][1], 4 * 256 * 64
        assert seconds == pytest.approx(tied * (latency + size / min(rates)))


def references(costs, factors):
    """As predicted, times the factors of shapes."""
    found = {}
    for shape, factor in factors.items():
        steps = shape.steps(16, 4, FP32)
        found[shape] = {of.microbatch_size: (factor * costs.predict(of).step_seconds,) for of in steps}
    return References(processes=4, batch=16, seconds=found)


def test_references_correct_predictions_of_their_shapes():
    plain = CostModel(model=model(), cluster=machine())
    shapes = Shape(4, 1, 1, False), Shape(1, 4, 1, False), Shape(1, 4, 1, True), Shape(1, 1, 4, False)
    known = references(plain, {**dict(zip(shapes, (1.21, 1.44, 2.25, 4.0), strict=True)), Shape(1, 2, 2, False): 3.0})
    assert References.from_mapping(json.loads(json.dumps(known.to_mapping()))) == known
    again = References.joined([known, known]).seconds
    assert again == {shape: {size: 2 * each for size, each in row.items()} for shape, row in known.seconds.items()}
    costs = plain.corrected_by(known, FP32)
    usual = {"microbatches": 4, "microbatch_size": 2, "precision": FP32}
    for degrees, factor in (
        ({"pipeline": 4}, 1.21),
        ({"data": 4}, 1.44),
        ({"data": 4, "strategy": DataStrategy.ZERO1}, 2.25),
        ({"inside": InsideStage(tensor=4)}, 4.0),
        ({"data": 2, "inside": InsideStage(tensor=2)}, 3.0),
        ({"pipeline": 2, "data": 2}, 1.1 * 1.2),
        ({"pipeline": 2, "data": 2, "strategy": DataStrategy.ZERO2}, 1.1 * 1.5),
        ({"pipeline": 2, "inside": InsideStage(tensor=2)}, 1.1 * 2.0),
        ({"pipeline": 2}, 1.0),  # of two processes nothing is known
    ):
        of = Configuration(**usual, **degrees)
        before, after = plain.predict(of), costs.predict(of)
        assert after.step_seconds == pytest.approx(factor * before.step_seconds)
        assert after.update_seconds == pytest.approx(factor * before.update_seconds)
        assert step_bound(costs, of) <= after.step_seconds


def test_factors_between_two_microbatch_sizes_follow_powers():
    plain = CostModel(model=model(), cluster=machine())
    replicas = Shape(1, 4, 1, False)
    known = references(plain, {replicas: 2.0})
    slower = {1: known.seconds[replicas][1], 4: (4 * known.seconds[replicas][4][0],)}
    costs = plain.corrected_by(replace(known, seconds={replicas: slower}), FP32)
    for samples, factor in ((1, 2.0), (2, 4.0), (4, 8.0), (8, 8.0)):
        of = Configuration(data=4, microbatch_size=samples, precision=FP32)
        assert costs.corrections.factor(of) == pytest.approx(factor)


@pytest.mark.parametrize(("spread", "kept"), [(1.001, 1.0), (1.4, 0.432), (3.0, 0.0)])
def test_shapes_are_corrected_as_far_as_they_differ_by_more_than_repeated_steps(spread, kept):
    """Measured ratios of 1.2 and 1.5, whose repeated steps lie within `spread`: `kept` of their distance is left."""
    plain = CostModel(model=model(), cluster=machine())
    shapes = Shape(4, 1, 1, False), Shape(1, 1, 4, False)
    known = references(plain, dict(zip(shapes, (1.2, 1.5), strict=True)))
    steps = {
        shape: {size: (each[0], each[0], each[0] * spread, each[0] * spread) for size, each in row.items()}
        for shape, row in known.seconds.items()
    }
    costs = plain.corrected_by(replace(known, seconds=steps), FP32)
    factors = [
        costs.corrections.factor(Configuration(**degrees, microbatches=4, precision=FP32))
        for degrees in ({"pipeline": 4}, {"inside": InsideStage(tensor=4)})
    ]
    assert factors[1] / factors[0] == pytest.approx((1.5 / 1.2) ** kept, rel=2e-3)


def test_references_are_those_that_can_run():
    small = GPTConfig(vocabulary_size=16, layers=2, width=12, heads=3, sequence_length=8)
    assert reference_shapes(small, 1) == []
    pipelines = [Shape(2, 1, 1, False, schedule) for schedule in ("1f1b", "gpipe", "zb-h1", "chimera")]
    assert reference_shapes(small, 2) == [Shape(1, 2, 1, False), Shape(1, 2, 1, True), *pipelines]
    larger = replace(small, layers=4)  # a block for each stage of a V
    assert Shape(2, 1, 1, False, "zb-v") in reference_shapes(larger, 2)
    assert reference_shapes(small, 3) == [Shape(1, 3, 1, False), Shape(1, 3, 1, True), Shape(1, 1, 3, False)]
    of_six = [shape for shape in reference_shapes(small, 6) if shape.schedule == "1f1b"]
    assert of_six[-1] == Shape(2, 1, 3, False)
    assert reference_shapes(small, 6)[: len(of_six)] == of_six


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        ((1, 4, 1, False), 8, [(2, 1), (1, 2)]),
        ((4, 1, 1, False), 8, [(8, 1), (2, 4)]),
        ((4, 1, 1, False), 100, [(32, 1), (2, 16)]),
        ((1, 4, 1, True), 4, [(1, 1)]),
        ((1, 4, 1, True), 3, []),
    ],
)
def test_reference_steps_are_of_the_smallest_and_the_largest_microbatches(shape, batch, expected):
    steps = Shape(*shape).steps(batch, 4, FP32)
    assert [(of.microbatches, of.microbatch_size) for of in steps] == expected
    assert {Shape.of(of) for of in steps} <= {Shape(*shape)}


def test_pipelines_are_corrected_by_the_schedule_that_is_most_like_theirs():
    plain = CostModel(model=model(), cluster=machine())
    deep = [shape for shape in Shape(4, 1, 1, False).with_schedules if shape.schedule != "zb-v"]  # has too many stages
    shapes = [*deep, Shape(2, 1, 2, False), Shape(2, 1, 2, False, "zb-v")]
    costs = plain.corrected_by(references(plain, dict(zip(shapes, (1.2, 1.1, 1.4, 1.6, 1.3, 1.5), strict=True))), FP32)

    def factor(schedule: str, chunks: int = 1, **degrees) -> float:
        of = Configuration(schedule=schedule, chunks=chunks, microbatches=4, precision=FP32, **degrees)
        return costs.corrections.factor(of)

    for schedule, expected in (("1f1b", 1.2), ("gpipe", 1.1), ("terapipe", 1.1), ("zb-h1", 1.4), ("zb-auto", 1.4)):
        assert factor(schedule, pipeline=4) == pytest.approx(expected)
    for schedule, expected in (("zb-v", 1.4), ("v-min", 1.4), ("chimera", 1.6), ("dualpipe", 1.6), ("hanayo", 1.2)):
        assert factor(schedule, 2, pipeline=4) == pytest.approx(expected)
    assert factor("interleaved", 2, pipeline=4) == pytest.approx(1.2)
    one = [Configuration(schedule=name, pipeline=4, precision=FP32, microbatch_size=4) for name in ("1f1b", "gpipe")]
    assert [costs.corrections.factor(of) for of in one] == pytest.approx([1.2, 1.2])  # the same order
    two = {"pipeline": 2, "inside": InsideStage(tensor=2)}
    assert factor("gpipe", **two) == pytest.approx(1.3)  # measured with 1F1B alone
    assert factor("gpipe", pipeline=2, data=2) == pytest.approx(1.1**0.5)
    assert [factor(schedule, 2, **two) for schedule in ("zb-v", "v-min", "chimera")] == pytest.approx([1.5, 1.5, 1.3])


def test_steps_of_the_same_order_are_one_reference():
    """With one micro-batch, GPipe is 1F1B: what was measured with each counts for both."""
    plain = CostModel(model=model(), cluster=machine())
    shapes = [Shape(2, 1, 1, False, schedule) for schedule in ("1f1b", "gpipe")]
    known = replace(references(plain, dict(zip(shapes, (1.2, 1.0), strict=True))), processes=2)
    whole = Configuration(pipeline=2, microbatches=1, microbatch_size=16, precision=FP32)
    seconds = plain.predict(whole).step_seconds
    rows = {
        shape: {**row, 16: (each * seconds,)}
        for (shape, row), each in zip(known.seconds.items(), (1.29, 1.31), strict=True)
    }
    costs = plain.corrected_by(replace(known, seconds=rows), FP32)

    def factors(of: Configuration) -> list[float]:
        return [costs.corrections.factor(of._replace(schedule=name)) for name in ("1f1b", "gpipe")]

    assert factors(whole._replace(microbatches=8, microbatch_size=1)) == pytest.approx([1.2, 1.0], rel=0.01)
    assert factors(whole) == [pytest.approx(1.3, rel=0.02)] * 2
    assert len(set(factors(whole))) == 1


def compared(costs: CostModel, devices: int, rng: random.Random) -> int:
    """How many steps the search's bounds are below: those of groups, data strategies and shapes."""
    space, count = Space(costs, Request(devices=devices, batch_size=16), Refusals(), lambda _: None), 0
    for group, _ in space.groups.found():
        for mesh in space.meshes(group, devices):
            ways = list(space.ways(mesh))
            for shape in some(space.shapes.found(mesh), 3, rng):
                way = rng.choice(ways)
                of = shape.of._replace(strategy=way.of.strategy, granularity=way.of.granularity)
                bounds = space.group_bound(group, devices), way.least, space.shapes.bound(shape)
                try:
                    seconds = costs.predict(of).step_seconds
                except PipeloomError:
                    continue
                assert max(*bounds, *space.shapes.link_bounds(shape, [way.of])) <= seconds * (1 + 1e-9), of
                count += 1
    return count


def test_bounds_of_the_search_hold_for_corrected_predictions():
    rng, plain = random.Random(3), CostModel(model=model(), cluster=machine())
    sizes = GPTConfig(vocabulary_size=256, layers=4, width=64, heads=4, sequence_length=64)
    shapes = [shape for shape in reference_shapes(sizes, 4) if shape.schedule != "gpipe"]  # with one micro-batch, 1F1B
    factors = {shape: rng.uniform(0.5, 1.5) for shape in shapes}
    costs = plain.corrected_by(references(plain, factors), FP32)
    assert costs.corrections.least < 0.7
    assert compared(costs, 4, rng) > 50


@pytest.mark.parametrize("first", [5.0, 0.2])
def test_bounds_of_the_search_hold_where_first_microbatches_take_another_time(first):
    times = LayerTimes(element=4, rows={1: layers(1.0)}, firsts={1: layers(first)})
    costs = CostModel(model=model(), cluster=machine(), measured=times)
    assert compared(costs, 2, random.Random(4)) > 20


def test_bounds_of_the_search_hold_where_more_processes_are_slower():
    measured = replace(machine().measured, cores=4, rates=(rates(1), rates(2), rates(4, GIGA / 10)))
    costs = CostModel(model=model(), cluster=replace(machine(), measured=measured))
    assert compared(costs, 2, random.Random(5)) > 20
