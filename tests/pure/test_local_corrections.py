"""Predictions for this machine: first micro-batches, tied tables, and corrections by reference steps."""

import json
from dataclasses import replace

import pytest

from pipeloom.ir.data_axis import DataStrategy
from pipeloom.models import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.step_bound import step_bound
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes, mean_layers
from pipeloom.plan.local.references import References, Shape, reference_shapes
from tests.pure.test_local_machine import machine, model

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
    assert reference_shapes(small, 2) == [(1, 2, 1, False), (1, 2, 1, True), (2, 1, 1, False)]
    assert reference_shapes(small, 3) == [(1, 3, 1, False), (1, 3, 1, True), (1, 1, 3, False)]
    assert reference_shapes(small, 6)[-1] == (2, 1, 3, False)


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
    assert {Shape.of(of) for of in steps} <= {shape}
