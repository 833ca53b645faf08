"""Zero Bubble's automatic scheduler against the paper's table, and within whatever memory it is given."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, Placement, Schedule, check
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


def handmade(p: int, m: int) -> list[Schedule]:
    """All hand-made schedules with one stage per rank."""
    made = []
    for name, family in schedules.FAMILIES.items():
        if family.to_measure or family.stream or family.chunks not in (1, None):
            continue
        try:
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m, num_chunks=1)
        except ScheduleError:
            continue
        if schedule.placement == Placement.loop(p):
            made.append(schedule)
    assert {schedule.name for schedule in made} >= {"naive", "gpipe", "1f1b", "dapple-pb", "zb-h1", "zb-h2"}
    return made


def never_slower(p: int, m: int, conditions: Conditions) -> float:
    """Seconds of zb-auto's step; fails where a hand-made schedule within the same caps is faster."""
    costs = Costs(
        forward=conditions.forward,
        backward_input=conditions.backward_input,
        backward_weight=conditions.backward_weight,
    )

    def seconds(schedule: Schedule) -> float:
        return simulate(schedule, costs, Network(latency_seconds=conditions.latency)).makespan

    schedule = schedules.zb_auto(num_ranks=p, num_microbatches=m, conditions=conditions)
    check(schedule)
    pairs = zip(most_held(schedule, conditions), conditions.caps, strict=True)
    assert all(held <= cap * (1 + 1e-6) for held, cap in pairs)
    for other in handmade(p, m):
        pairs = zip(most_held(other, conditions), conditions.caps, strict=True)
        if all(held <= cap for held, cap in pairs):
            assert seconds(schedule) <= seconds(other) * (1 + 1e-9), other.name
    return seconds(schedule)


@pytest.mark.parametrize(
    ("p", "m", "limit", "seconds"),
    [
        (8, 4, math.inf, 23),  # 1F1B takes 33; the greedy runs alone 47
        (8, 4, 8, 23),
        (8, 4, 1, 4 * (8 + 8 + 1)),  # one micro-batch at a time: W of rank 0 comes before its next F
        (32, 16, math.inf, 95),
        # 1F1B takes 285; the greedy runs alone 2,175
        pytest.param(64, 32, math.inf, 191, marks=pytest.mark.whole_grid),
        (8, 24, math.inf, 79),
        (1, 3, math.inf, 9),
        (5, 1, math.inf, 11),
    ],
)
def test_with_equal_times(p, m, limit, seconds):
    conditions = Conditions.uniform(Placement.loop(p), memory_limit=limit)
    assert never_slower(p, m, conditions) == seconds


@pytest.mark.parametrize("p", [2, 4, 7])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_never_slower_than_a_hand_made_schedule_with_equal_stages(p, latency):
    """Every number of micro-batches with every memory limit, and with all times by turns."""
    kinds = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.5), (1.0, 0.7, 1.6))
    for turn, (m, limit) in enumerate(product(sorted({1, p // 2, p - 1, p, 2 * p}), (1, p / 2 + 1, p, math.inf)), p):
        times = dict(zip(("forward", "backward_input", "backward_weight"), kinds[turn % 3], strict=True))
        more = {"latency": latency, "weight_gradient": 0.4, "memory_limit": limit}
        never_slower(p, m, Conditions.uniform(Placement.loop(p), **times, **more))


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 6), st.integers(1, 14), st.integers(0, 2**32), st.booleans())
def test_never_slower_than_a_hand_made_schedule(p, m, seed, limited):
    rng = random.Random(seed)

    def some(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(p))

    activation = some(0.5, 2.0)
    conditions = Conditions(
        forward=some(0.1, 3.0),
        backward_input=some(0.1, 3.0),
        backward_weight=some(0.0, 3.0),
        latency=tuple(some(0.0, 0.5) for _ in range(p)),
        activation=activation,
        weight_gradient=tuple(kept * rng.random() for kept in activation),
        caps=tuple(kept * rng.uniform(1, 2 * p) if limited else math.inf for kept in activation),
    )
    never_slower(p, m, conditions)


def interleaved_seconds(p: int, m: int, v: int, pair: float, latency: float, *, first_of_group_only: bool) -> float:
    """Seconds of Megatron's interleaved 1F1B, action by action; F and B of one chunk take `pair` together.

    Between chunks, rank p-1 sends to rank 0 (forward) and rank 0 to rank p-1 (backward). All receivers wait for their
    message, or, of every p micro-batches in a row, only the first.
    """
    table = [(first + b, chunk) for first in range(0, m, p) for chunk in range(v) for b in range(p)]
    orders = []
    for d in range(p):
        warm = min(2 * (p - 1 - d) + (v - 1) * p, m * v)
        steady = [step for i in range(m * v - warm) for step in (("F", warm + i), ("B", i))]
        orders.append([("F", i) for i in range(warm)] + steady + [("B", i) for i in range(m * v - warm, m * v)])
    ended: dict[tuple[str, int, int, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    while len(ended) < 2 * p * m * v:
        for d, order in enumerate(orders):
            while position[d] < len(order):
                op, index = order[position[d]]
                b, chunk = table[index]
                step = -1 if op == "F" else 1
                wraps = not 0 <= d + step < p
                need = (op, (d + step) % p, b, chunk - wraps)
                start = clock[d]
                if chunk - wraps >= 0:
                    if need not in ended:
                        break
                    if not (wraps and first_of_group_only and b % p):
                        start = max(start, ended[need] + latency)
                clock[d] = ended[op, d, b, chunk] = start + pair / (3 if op == "F" else 1.5)
                position[d] += 1
    return max(clock)


@pytest.mark.parametrize(("p", "m", "v", "pair", "latency"), [(8, 24, 3, 45.945, 0.601), (4, 8, 2, 3.0, 0.1)])
def test_the_latency_of_interleaved_1f1b(p, m, v, pair, latency):
    """Ours is above Zero Bubble's Table 5, whose simulation leaves out most waits for wrap-around messages.

    The longest chain: the first micro-batch down all p*v stages, rank p-1 from there to the last backward of the last
    chunk without a break, and the last micro-batch up all p*v stages. It has p*v-1 messages each way.
    """
    costs = Costs.uniform(forward=pair / 3, backward=2 * pair / 3)
    schedule = schedules.interleaved(num_ranks=p, num_microbatches=m, num_chunks=v)
    chain = (m * v + p - 1) * pair / v + 2 * (p * v - 1) * latency
    assert simulate(schedule, costs, Network(latency_seconds=latency)).makespan == pytest.approx(chain)
    assert interleaved_seconds(p, m, v, pair / v, latency, first_of_group_only=False) == pytest.approx(chain)
    less = interleaved_seconds(p, m, v, pair / v, latency, first_of_group_only=True)
    assert less == pytest.approx(chain - p * latency)
    if p == 8:
        assert round(1 - m * pair / less, 4) == 0.1055  # the table's
        assert round(1 - m * pair / chain, 4) == 0.1090


@pytest.mark.parametrize("p", [2, 3, 5])
def test_short_latencies_add_as_many_messages_as_the_longest_chain_has(p):
    for v, groups, forward, part in product((2, 3, 4), (1, 2, 3), (0.5, 1.0, 2.0), (0.2, 1.0)):
        schedule = schedules.interleaved(num_ranks=p, num_microbatches=groups * p, num_chunks=v)
        latency = part * min(forward, 1.5) / v
        found = simulate(schedule, Costs.uniform(forward=forward, backward=1.5), Network(latency_seconds=latency))
        expected = (groups * p * v + p - 1) * (forward + 1.5) / v + 2 * (p * v - 1) * latency
        assert found.makespan == pytest.approx(expected)


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
        ({"memory_limit": 0.5}, r"rank 0 has a cap of 0.5, but one micro-batch keeps 1 there\. Raise the cap"),
        ({"memory_limit": -1}, "a memory cap must be at least 0"),
        ({"memory_limit": float("nan")}, "a memory cap must be at least 0"),
        ({"weight_gradient": 1.5}, r"weight_gradient\[0\]=1\.5: must be at most activation\[0\]=1"),
        ({"forward": -1.0}, "forward=-1.0"),
        ({"latency": float("inf")}, "latency=inf"),
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
