"""Slips of those who write schedules by hand: each is refused in one short line, before anything takes long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import Action, Op, Placement, Schedule, schedules
from pipeloom.cli import main
from pipeloom.errors import ScheduleError
from pipeloom.ir import DataAxis, Program, WeightPolicy, check
from pipeloom.ir.text import from_json, parse_action, parse_orders, to_json
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import lower
from pipeloom.sim import Costs, simulate

F, B = Op.F, Op.B
GOOD = schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
TEXT = to_json(GOOD)
LARGE = schedules.gpipe(num_ranks=8, num_microbatches=1024)
BEHIND = replace(GOOD, orders=(GOOD.orders[0], (*GOOD.orders[1], Action(2, F, 0))))
SLICED = schedules.terapipe(num_ranks=2, num_microbatches=1, num_slices=2)


def having(action: object, schedule: Schedule = GOOD) -> Schedule:
    """`schedule` with its first action replaced."""
    first = schedule.orders[0]
    return replace(schedule, orders=((action, *first[1:]), *schedule.orders[1:]))


def program(*, rank_0: str) -> Program:
    return replace(lower(GOOD), orders=(*parse_orders(rank_0), lower(GOOD).orders[1]))


SLIPS = {
    "nothing": (lambda: check(None), "None: must be a Schedule or a Program. Make one with"),
    "a name that is None": (
        lambda: schedules.build(None, num_ranks=2, num_microbatches=2),
        "schedule=None: must be a str",
    ),
    "simulated nothing": (lambda: simulate(None, Costs.uniform()), "None: must be a Schedule or a Program"),
    "lowered nothing": (lambda: lower(None), "None: must be a Schedule or a Program"),
    "written nothing": (lambda: to_csv([]), "must be a Schedule"),
    "orders are None": (lambda: replace(GOOD, orders=None), "has orders None: each rank"),
    "orders are text": (lambda: replace(GOOD, orders="0F0 0B0"), "text to pipeloom.schedules.from_orders"),
    "a rank is text": (lambda: replace(GOOD, orders=("0F0", "0B0")), "has '0F0' for rank 0: .*from_orders"),
    "an action is text": (lambda: check(having("0F0")), "rank 0 has '0F0' at position 0: .*Write Action"),
    "an action is a tuple": (lambda: check(having((0, F, 0, None))), "an order holds Actions"),
    "an op is text": (
        lambda: check(having(Action(0, "F", 0))),
        "an order holds Actions: an int, an Op.*Correct its fields",
    ),
    "a stage is a float": (lambda: check(having(Action(0.0, F, 0))), "Correct its fields"),
    "of many": (
        lambda: check(having(Action(0, "F", 0), LARGE)),
        "an order holds Actions: an int, an Op.*Correct its fields",
    ),
    "a micro-batch is True": (lambda: check(having(Action(0, F, True))), "Correct its fields"),
    "negative stage": (
        lambda: check(having(Action(-1, F, 0))),
        r"-1F0 on rank 0: the stage does not exist. Use one of the stages 0\.\.1",
    ),
    "negative micro-batch": (
        lambda: check(having(Action(0, F, -1))),
        r"0F-1 on rank 0: the micro-batch does not exist. Use one of the micro-batches 0\.\.1",
    ),
    "no micro-batch": (
        lambda: check(having(Action(0, F))),
        r"0F on rank 0: the micro-batch does not exist. Use one of the micro-batches 0\.\.1",
    ),
    "a slice too many": (lambda: check(having(Action(0, F, 0, 0))), "0F0.0 on rank 0: .*Remove its slice"),
    "no slice": (
        lambda: check(having(Action(0, F, 0), SLICED)),
        "0F0 on rank 0: slices are numbered .*Use one of the slices 0..1",
    ),
    "unknown slice": (
        lambda: check(having(Action(0, F, 0, 2), SLICED)),
        "0F0.2 on rank 0: .*Use one of the slices 0..1",
    ),
    "slices beyond number": (lambda: check(replace(GOOD, num_slices=10**18)), "Use one of the slices 0..9+"),
    "micro-batches": (lambda: check(replace(GOOD, num_microbatches=10**18)), "0F2 is missing"),
    "of a large one": (lambda: check(replace(LARGE, num_microbatches=10**12)), "0F1024 is missing"),
    "in a file": (lambda: check(from_json(TEXT.replace(": 2", ": 1000000000000", 1))), "0F2 is missing"),
    "a rank too few": (lambda: check(replace(GOOD, orders=GOOD.orders[:1])), "1 orders for 2 ranks: each rank"),
    "a rank too many": (lambda: check(replace(GOOD, orders=(*GOOD.orders, ()))), "3 orders for 2 ranks: each rank"),
    "nothing to do": (lambda: check(replace(GOOD, orders=((), ()))), "0F0 is missing: .*Add it to rank 0"),
    "sizes": (lambda: replace(GOOD, num_microbatches=2.0), "num_microbatches of .* is 2.0: must be an int"),
    "policy": (lambda: replace(GOOD, weights="flush"), "weights of .* is 'flush'.*of type WeightPolicy"),
    "placement": (lambda: replace(GOOD, placement=((0,), (1,))), "of type Placement"),
    "pairs": (lambda: replace(GOOD, overlapped=[1]), "the overlapped pair 1: a pair is a tuple"),
    "ranks of a stage": (
        lambda: Placement((0, 1)),
        "a placement needs the ranks of each stage. Pass a tuple of tuples",
    ),
    "rank of text": (lambda: Placement((("0",),)), "a rank of a placement is '0'"),
    "endless placement": (lambda: Placement.loop(10**18), "the number of stages, at most 1,048,575"),
    "endless replicas": (lambda: Placement.replicated([10**18]), "the number of stages, at most 1,048,575"),
    "program of nothing": (lambda: Program(schedule=None, orders=()), "the schedule of a program is None"),
    "groups": (lambda: replace(lower(GOOD), gradient_groups=((0, 9),)), "stages must be in 0..1"),
    "data": (lambda: replace(lower(GOOD), data=2), f"of type {DataAxis.__name__}"),
    "a message of nothing": (
        lambda: check(program(rank_0="0F0 0SEND_F 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1")),
        "0SEND_F on rank 0: .*Use one of the micro-batches 0..1",
    ),
    "another order": (
        lambda: check(program(rank_0="0F1 0SEND_F1 0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1")),
        "rank 0 runs 0F1 where its schedule has 0F0: .*Lower the schedule that is meant",
    ),
    "stage of a program": (
        lambda: check(program(rank_0="7STEP 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1")),
        "7STEP on rank 0: the stage does not exist",
    ),
    "word": (lambda: parse_action("0F" * 500), "an action is stage, op"),
    "no word": (lambda: parse_action(3), "3: an action is stage, op"),
    "no orders": (lambda: parse_orders(None), "the text of orders is None"),
    "no CSV": (lambda: from_csv(None), "the text of a CSV is None"),
    "a CSV of quotes": (lambda: from_csv("0F0,0B0\r0F1\x00"), "an action is stage, op"),
    "no JSON": (lambda: from_json(None), "the schedule is not valid JSON"),
    "a key is gone": (lambda: from_json(TEXT.replace('"name"', '"nom"')), "missing key 'name'"),
    "a part of a number": (lambda: from_json(TEXT.replace(": 2", ": 2.7", 1)), "num_microbatches=2.7"),
    "not false": (lambda: from_json(TEXT.replace(": false", ': "no"')), ".*: forward_only='no'"),
    "rows": (
        lambda: from_json(TEXT.replace('"0F0 0F1 0B0 0B1"', "3")),
        r"the schedule: orders\[0\]=3: must be a string",
    ),
    "no object": (lambda: from_json("[]"), "the schedule is \\[\\]: must be an object with keys"),
    "unchecked": (lambda: simulate(BEHIND, Costs.uniform()), "2F0 on rank 1: the stage does not exist"),
    "unchecked lowered": (lambda: lower(having(3)), "rank 0 has 3 at position 0"),
    "unchecked written": (lambda: to_csv(having([])), "position 0"),
    "stream": (
        lambda: check(replace(GOOD, weights=WeightPolicy.STASH, microbatches_per_update=1, num_microbatches=10**18)),
        "0F2 is missing",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_refused_in_one_short_line(slip):
    make, said = SLIPS[slip]
    with pytest.raises(ScheduleError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450


def test_a_circle_of_many_ranks_is_short():
    rows = [f"{d}F0 {64 + d}F0 {64 + d}B0 {d}B0" for d in range(64)]
    rows[0] = "64F0 0F0 64B0 0B0"
    with pytest.raises(ScheduleError, match=r"deadlocks: .*and so on over 64 ranks") as caught:
        schedules.from_orders(rows)
    assert len(str(caught.value)) < 450


def test_lists_are_made_to_hold_still():
    lists = [list(order) for order in GOOD.orders]
    made = replace(GOOD, orders=lists)
    lists[0].clear()
    assert made == GOOD
    assert check(made) == check(GOOD)


@pytest.mark.parametrize("name", [*schedules.FAMILIES, "examples/own_schedule.py:eager_one_f_one_b"])
def test_sizes_of_which_nothing_can_be_made_are_refused_at_once(name, capsys):
    for ranks, microbatches in ((100_000, 100_000), (10**18, 1), (1, 10**18), (10**18, 10**18)):
        with pytest.raises(ScheduleError, match="Use smaller sizes") as caught:
            schedules.build(name, num_ranks=ranks, num_microbatches=microbatches)
        assert "at most" in str(caught.value)
        assert main(["simulate", name, "--ranks", str(ranks), "--microbatches", str(microbatches)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "Use smaller sizes" in line


def test_the_limit_says_what_is_asked_for():
    with pytest.raises(
        ScheduleError, match="20,000,000,000 forwards and backwards: this schedule has at most 20,000,000"
    ):
        schedules.gpipe(num_ranks=100_000, num_microbatches=100_000)
    with pytest.raises(ScheduleError, match="this schedule has at most 1,000,000"):
        schedules.build("v-half", num_ranks=512, num_microbatches=1024)
    assert schedules.gpipe(num_ranks=1, num_microbatches=100_000).num_microbatches == 100_000
