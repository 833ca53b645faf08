"""The search: within every cap, never above the best named schedule, never below the bound, best on tiny cases."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Placement, check
from pipeloom.schedules import Conditions
from pipeloom.schedules.search.bounds import lower_bound
from pipeloom.schedules.search.exact import bound_alone, shortest
from pipeloom.schedules.search.greedy import Shop
from pipeloom.schedules.search.operations import Work
from pipeloom.schedules.search.tabu import improve
from pipeloom.sim import Costs, Network, simulate
from tests.pure.test_zb_auto import most_held


def instance(rng: random.Random, placement: Placement, looseness: float) -> Conditions:
    """Uneven stages, links and caps; at `looseness` 1 the caps hold one micro-batch."""
    stages, ranks = placement.num_stages, placement.num_ranks

    def some(low, high, count=stages):
        return tuple(rng.uniform(low, high) for _ in range(count))

    activation = some(0.5, 1.5)
    return Conditions(
        forward=some(0.5, 1.5),
        backward_input=some(0.5, 1.5),
        backward_weight=some(0.3, 1.2),
        latency=tuple(some(0.0, 0.2, ranks) for _ in range(ranks)),
        activation=activation,
        weight_gradient=tuple(kept * rng.uniform(0.2, 0.8) for kept in activation),
        caps=tuple(looseness * sum(activation[s] for s in held) for held in placement.stages_of),
    )


def simulated(schedule, conditions: Conditions):
    costs = Costs.per_stage(
        forward=conditions.forward,
        backward_input=conditions.backward_input,
        backward_weight=conditions.backward_weight,
    )
    return simulate(schedule, costs, Network(latency_seconds=conditions.latency))


@pytest.mark.parametrize(
    "placement",
    [Placement.loop(1), Placement.loop(4), Placement.loop(2, 2), Placement.v(3), Placement.bidirectional(4)],
    ids=["one", "loop", "chunks", "v", "bidirectional"],
)
@pytest.mark.parametrize("looseness", [1.0, 1.6, 3.0, math.inf])
def test_never_above_the_best_named_schedule_nor_any_cap(placement, looseness):
    rng = random.Random(f"{placement}{looseness}")
    for m in (1, 4, 8):
        conditions = instance(rng, placement, looseness)
        found = schedules.search(placement=placement, num_microbatches=m, conditions=conditions, effort=20_000)
        check(found.schedule)
        assert simulated(found.schedule, conditions).makespan == pytest.approx(found.makespan)
        assert found.lower_bound <= found.makespan * (1 + 1e-9)
        for held, cap in zip(most_held(found.schedule, conditions), conditions.caps, strict=True):
            assert held <= cap * (1 + 1e-6)
        if looseness == math.inf or looseness * len(placement.replicas) > 4 * m * placement.num_chunks:
            assert found.best_named is not None
        if found.best_named is not None:
            assert found.makespan <= found.best_named[1] * (1 + 1e-9)


def test_the_best_named_is_the_best_of_the_table_under_the_caps():
    placement = Placement.loop(4)
    conditions = instance(random.Random(5), placement, 3.0)
    found = schedules.search(placement=placement, num_microbatches=8, conditions=conditions, effort=0)
    best = {}
    for name, family in schedules.SYNCHRONOUS.items():
        if name == "search" or family.chunks == 2 or name == "hanayo":
            continue
        schedule = schedules.build(name, num_ranks=4, num_microbatches=8, num_chunks=1, conditions=conditions)
        if all(h <= c * (1 + 1e-9) for h, c in zip(most_held(schedule, conditions), conditions.caps, strict=True)):
            best[name] = simulated(schedule, conditions).makespan
    name = min(best, key=best.get)
    assert found.best_named == (name, pytest.approx(best[name]))


def test_a_fat_last_stage_gains():
    """The last stage takes twice as long: the order that fits all ranks alike is far from the best."""
    placement = Placement.loop(4)
    conditions = Conditions.uniform(placement, memory_limit=4, weight_gradient=0.5)
    conditions = replace(conditions, forward=(1, 1, 1, 2), backward_input=(1, 1, 1, 2), backward_weight=(1, 1, 1, 2))
    found = schedules.search(placement=placement, num_microbatches=12, conditions=conditions)
    assert found.makespan == pytest.approx(found.lower_bound)
    assert found.makespan <= found.best_named[1]


def test_the_same_seed_finds_the_same():
    conditions = instance(random.Random(3), Placement.v(3), 2.0)
    first, second = (
        schedules.search(placement=Placement.v(3), num_microbatches=5, conditions=conditions, effort=30_000, seed=7)
        for _ in range(2)
    )
    assert first == second


def rank_orders(rank_actions):
    """Every order of one rank's actions in which F, I and W of a micro-batch and each op's micro-batches ascend."""
    for order in itertools.permutations(rank_actions):
        place = {(a.op, a.microbatch): at for at, a in enumerate(order)}
        if all(
            place["F", b] < place["I", b] < place["W", b] and all(place[op, 0] < place[op, 1] for op in "FIW")
            for b in (0, 1)
        ):
            yield order


def test_tiny_steps_are_solved_to_the_optimum():
    for seed in range(6):
        rng = random.Random(seed)
        placement = Placement.loop(2)
        conditions = instance(rng, placement, rng.choice((1.0, 1.5, 2.0)))
        work = Work(placement, 2, conditions)
        numbered = [[work.number[a] for a in sorted(work.actions) if a.stage == rank] for rank in (0, 1)]
        choices = []
        for rank in (0, 1):
            orders = rank_orders([work.actions[n] for n in numbered[rank]])
            orders = [[work.number[a] for a in order] for order in orders]
            choices.append([order for order in orders if work.fits(rank, order)])
        optimum = min(work.makespan([a, b]) for a in choices[0] for b in choices[1])
        found = schedules.search(placement=placement, num_microbatches=2, conditions=conditions, effort=200_000)
        assert found.lower_bound == pytest.approx(optimum)
        assert found.makespan == pytest.approx(optimum)
        makespan, orders, bound = shortest(work, math.inf, 10_000)
        assert makespan == pytest.approx(bound) == pytest.approx(optimum)
        assert work.makespan(orders) == makespan


@pytest.mark.parametrize("seed", range(7))
def test_bounds_hold_and_small_steps_are_found(seed):
    """Against the exact search: every bound is below the shortest step, and the search finds that step."""
    rng = random.Random(seed)
    shapes = [Placement.loop(3), Placement.v(2), Placement.loop(2, 2), Placement.loop(1, 2), Placement.v(2, 3)]
    placement = shapes[seed % len(shapes)]
    conditions = instance(rng, placement, rng.choice((1.0, 1.3, 1.6, 2.0, math.inf)))
    work = Work(placement, 3 if placement.num_stages < 5 else 2, conditions)
    optimum, _, bound = shortest(work, math.inf, 20_000)
    assert bound == pytest.approx(optimum)
    assert lower_bound(work) <= optimum * (1 + 1e-9)
    for rank in range(placement.num_ranks):
        for width in (3, 50):
            assert bound_alone(work, rank, 2 * optimum, 0.0, width) <= optimum * (1 + 1e-9)
    found = schedules.search(
        placement=placement, num_microbatches=work.num_microbatches, conditions=conditions, effort=200_000
    )
    assert found.makespan == pytest.approx(optimum)


@pytest.mark.parametrize(
    "placement",
    [Placement.loop(3), Placement.loop(2, 3), Placement.v(3), Placement.bidirectional(4), Placement.replicated((2, 1))],
    ids=["loop", "chunks", "v", "bidirectional", "replicated"],
)
def test_whatever_the_rules_say_the_caps_hold_and_nothing_blocks(placement):
    rng = random.Random(str(placement))
    for looseness in (1.0, 1.6, math.inf):
        conditions = instance(rng, placement, looseness)
        work = Work(placement, 7, conditions)
        shop = Shop(work)
        draw = np.random.default_rng(0)
        rules = draw.normal(scale=3.0, size=(20, placement.num_ranks * shop.genes))
        spans, orders = shop.play(rules)
        for span, row in zip(spans, orders, strict=True):
            made = shop.orders(row)
            check(work.schedule("played", made))
            assert work.makespan(made) == pytest.approx(span)
            assert work.all_fit(made)
        limited, _ = shop.play(rules, limit=float(np.median(spans)))
        assert (limited[spans <= np.median(spans)] == spans[spans <= np.median(spans)]).all()


def test_moves_only_improve_and_keep_the_caps():
    placement = Placement.v(3)
    work = Work(placement, 6, instance(random.Random(8), placement, 2.0))
    start = work.one_by_one()
    makespan, orders = improve(work, start, 0.0, 200, random.Random(0))
    assert makespan == work.makespan(orders) < 0.7 * work.makespan(start)
    assert work.all_fit(orders)
    check(work.schedule("improved", orders))


@pytest.mark.parametrize(
    ("placement", "microbatches", "seed", "looseness"),
    [(Placement.loop(2, 2), 3, 1, 1.6), (Placement.loop(2, 2), 3, 2, 2.0), (Placement.v(2), 4, 3, 1.2)],
    ids=["loop", "loose loop", "v"],
)
def test_a_hundred_moves_come_within_a_thousandth_of_the_optimum(placement, microbatches, seed, looseness):
    work = Work(placement, microbatches, instance(random.Random(seed), placement, looseness))
    optimum, _, bound = shortest(work, math.inf, 300)
    assert bound == pytest.approx(optimum)
    makespan, _ = improve(work, work.one_by_one(), 0.0, 100, random.Random(1))
    assert makespan <= optimum * 1.001


@pytest.mark.parametrize(
    ("placement", "microbatches", "width"), [(Placement.v(2), 4, 10), (Placement.loop(2, 2), 3, 50)], ids=["v", "loop"]
)
def test_few_beginnings_prove_the_optimum(placement, microbatches, width):
    work = Work(placement, microbatches, instance(random.Random(5), placement, 2.0))
    makespan, orders, bound = shortest(work, math.inf, width)
    assert makespan == work.makespan(orders) == pytest.approx(bound)


@pytest.mark.parametrize("seed", [4, 6, 7])
def test_the_bound_is_met_where_memory_forces_the_order(seed):
    """Caps of two micro-batches: a third can only begin where one of the first has come back."""
    placement = Placement.v(2)
    work = Work(placement, 3, instance(random.Random(seed), placement, 2.0))
    optimum, _, _ = shortest(work, math.inf, 300)
    assert lower_bound(work) == pytest.approx(optimum)


def test_no_bound_is_raised_above_an_optimum(monkeypatch):
    def never(*_):
        raise AssertionError("the named schedule is as short as the bound")

    monkeypatch.setattr(sys.modules["pipeloom.schedules.search.search"], "bound_alone", never)
    found = schedules.search(placement=Placement.loop(2), num_microbatches=2)
    assert found.makespan == pytest.approx(found.lower_bound)


def test_cp_sat_proves_what_was_found():
    pytest.importorskip("ortools")
    for placement in (Placement.loop(3), Placement.v(2), Placement.bidirectional(2)):
        conditions = instance(random.Random(1), placement, 1.5)
        found = schedules.search(placement=placement, num_microbatches=2, conditions=conditions, effort=0)
        proved = schedules.prove(found, conditions=conditions, seconds=600.0)  # it ends when all is proved
        check(proved.schedule)
        assert simulated(proved.schedule, conditions).makespan == pytest.approx(proved.makespan)
        assert found.lower_bound <= proved.lower_bound <= proved.makespan <= found.makespan
        assert proved.makespan <= proved.lower_bound * (1 + 1e-5)


PROVES = """
import os, random, signal, threading, time
from pipeloom import schedules
from pipeloom.ir import Placement
from tests.pure.test_search import instance

def prove(ranks, seconds):
    placement = Placement.v(ranks)
    conditions = instance(random.Random(1), placement, 1.5)
    found = schedules.search(placement=placement, num_microbatches=2 * ranks, conditions=conditions, effort=0)
    running.set()
    schedules.prove(found, conditions=conditions, seconds=seconds, workers=2)

def interrupt():
    running.wait()
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGINT)

running = threading.Event()
threading.Thread(target=interrupt).start()
for ranks, seconds in ((6, 400), (2, 10)):
    try:
        prove(ranks, seconds)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_ends_the_solver_and_one_after_it_comes_through():
    """The solver has a handler of its own, behind which the second one would end the process."""
    pytest.importorskip("ortools")
    done = subprocess.run([sys.executable, "-c", PROVES], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 2), done.stderr


def test_proving_without_the_solver_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    found = schedules.search(placement=Placement.loop(2), num_microbatches=2, effort=0)
    with pytest.raises(InputError, match=r"ortools, which is not installed\. Run `pip install 'pipeloom\[search\]'`"):
        schedules.prove(found, conditions=Conditions.uniform(Placement.loop(2)))


def test_the_caps_that_a_refusal_names_are_the_smallest_that_do():
    placement = Placement.bidirectional(4)
    conditions = instance(random.Random(2), placement, 0.1)
    with pytest.raises(ScheduleError) as refused:
        schedules.search(placement=placement, num_microbatches=4, conditions=conditions)
    named = tuple(map(float, str(refused.value).rpartition(" are ")[2].rstrip(".").split(", ")))
    found = schedules.search(
        placement=placement, num_microbatches=4, conditions=replace(conditions, caps=named), effort=0
    )
    assert most_held(found.schedule, conditions) == pytest.approx(named)


def test_caps_that_hold_no_micro_batch_and_foreign_conditions_are_refused():
    placement = Placement.v(2)
    with pytest.raises(
        ScheduleError,
        match=r"rank 0 has a cap of 0\.9, but one micro-batch keeps 1 there\. Raise the cap .* smallest .* are 1, 1\.$",
    ):
        schedules.search(
            placement=placement, num_microbatches=2, conditions=Conditions.uniform(placement, memory_limit=0.9)
        )
    with pytest.raises(ScheduleError, match="the conditions are for 4 stages and 2 ranks"):
        schedules.search(
            placement=Placement.loop(2), num_microbatches=2, conditions=Conditions.uniform(placement, memory_limit=2)
        )
