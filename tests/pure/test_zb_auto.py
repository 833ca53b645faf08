"""Zero Bubble's automatic scheduler against the paper's table, and within whatever memory it is given."""

from __future__ import annotations

import random

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, Placement, check
from pipeloom.schedules import Conditions
from pipeloom.sim import Costs, Network, simulate


def most_held(schedule, conditions: Conditions) -> list[float]:
    """For each rank, the peak of what it holds: F keeps the activation, I leaves the weight gradient's part of it."""
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for stage, op, _, _ in order:
            kept, left = conditions.activation[stage], conditions.weight_gradient[stage]
            held += {Op.F: kept, Op.I: left - kept, Op.W: -left, Op.B: -kept}[op]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def test_the_rates_of_table_5():
    """Zero Bubble, Table 5, the 1.5 B model with 24 micro-batches on 8 ranks: milliseconds, h=2304, a=24, s=1024."""
    p, m = 8, 24
    forward, backward_input, backward_weight, latency = 18.522, 18.086, 9.337, 0.601
    times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    rates = {}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        rates[name] = schedules.build(name, num_ranks=p, num_microbatches=m)
    for name, limit in (("zb-1p", p), ("zb-2p", 2 * p)):
        conditions = Conditions.uniform(
            Placement.loop(p),
            **times,
            latency=latency,
            weight_gradient=32 / (34 + 5 * 24 * 1024 / 2304),
            memory_limit=limit,
        )
        rates[name] = schedules.zb_auto(num_ranks=p, num_microbatches=m, conditions=conditions)
        assert max(most_held(rates[name], conditions)) <= limit + 1e-9
    found = {
        name: round(simulate(schedule, Costs(**times), Network(latency_seconds=latency)).bubble_fraction_span, 4)
        for name, schedule in rates.items()
    }
    assert found == {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083, "zb-1p": 0.1585, "zb-2p": 0.0433}


def test_any_limit_any_times():
    rng = random.Random(0)
    for _ in range(120):
        p, m = rng.randint(1, 6), rng.randint(1, 14)

        def times(p=p):
            return tuple(rng.uniform(0.1, 3.0) for _ in range(p))

        activation = times()
        conditions = Conditions(
            forward=times(),
            backward_input=times(),
            backward_weight=times(),
            latency=tuple(tuple(rng.uniform(0, 0.5) for _ in range(p)) for _ in range(p)),
            activation=activation,
            weight_gradient=tuple(kept * rng.uniform(0, 1) for kept in activation),
            caps=tuple(kept * rng.uniform(1, 2 * p) for kept in activation),
        )
        schedule = schedules.zb_auto(num_ranks=p, num_microbatches=m, conditions=conditions)
        check(schedule)
        for held, cap in zip(most_held(schedule, conditions), conditions.caps, strict=True):
            assert held <= cap * (1 + 1e-6)


def test_more_memory_never_makes_a_longer_span_in_the_papers_case():
    spans = []
    for limit in range(1, 17):
        conditions = Conditions.uniform(Placement.loop(8), memory_limit=limit)
        schedule = schedules.zb_auto(num_ranks=8, num_microbatches=24, conditions=conditions)
        spans.append(simulate(schedule, Costs.uniform()).span_seconds)
    assert spans == sorted(spans, reverse=True)
    assert spans[15] == 72.0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_limit": 0.5}, "rank 0 may hold 0.5, but one micro-batch keeps 1 there; raise the limit"),
        ({"memory_limit": -1}, "a cap is 0 or more"),
        ({"memory_limit": float("nan")}, "a cap is 0 or more"),
        ({"weight_gradient": 1.5}, "keeps 1.5 after I and 1 before"),
        ({"forward": -1.0}, "forward is -1.0"),
        ({"latency": float("inf")}, "latency is inf"),
    ],
)
def test_impossible_conditions_are_refused_in_one_line(limits, message):
    def build():
        conditions = Conditions.uniform(Placement.loop(3), **limits)
        return schedules.zb_auto(num_ranks=3, num_microbatches=4, conditions=conditions)

    with pytest.raises(ScheduleError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_conditions_for_another_pipeline_are_refused():
    with pytest.raises(ScheduleError, match="conditions are for 4 stages and 2 ranks"):
        schedules.zb_auto(num_ranks=4, num_microbatches=4, conditions=Conditions.uniform(Placement.v(2)))
