"""The rules of legality: each is needed, each names itself, and all of them hold after every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op, Program, Schedule, WeightPolicy, check
from pipeloom.ir.check.program_rules import PROGRAM_RULES, updates_of_a_stream
from pipeloom.ir.check.schedule_rules import SCHEDULE_RULES
from pipeloom.ir.skips import Skip
from pipeloom.ir.text import parse_orders
from pipeloom.passes import (
    evaluation_schedule,
    forward_only,
    insert_communication,
    insert_data_parallel,
    insert_gradient_reduction,
    insert_offload,
    insert_updates,
    lower,
    merge_backwards,
    repeat_steps,
    separate_units,
)
from pipeloom.passes.offload import least_held
from pipeloom.sim import Costs, simulate

GOOD = schedules.from_orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", name="good")
STREAM = schedules.pipedream(num_ranks=2, num_microbatches=4)
SLICED = schedules.seq1f1b(num_ranks=2, num_microbatches=2, num_slices=2)
PAIRED = schedules.dualpipev(num_ranks=2, num_microbatches=4)
ZERO3 = DataAxis(degree=2, strategy=DataStrategy.ZERO3)


def schedule(*orders: str) -> Schedule:
    """GOOD with other orders."""
    return replace(GOOD, orders=parse_orders("\n".join(orders)))


def program(old: str, new: str, data: DataAxis | None = None, tied: bool = False, of: Schedule = GOOD) -> Program:
    """The program of a schedule with something else in the place of `old`, where it comes first."""
    made = lower(of, data=data, tied_stages=((0, 1),) if tied else ())
    text = "\n".join(" ".join(map(str, order)) for order in made.orders)
    assert old in text
    return replace(made, orders=parse_orders(text.replace(old, new, 1)))


RANK_1 = "1F0 1B0 1F1 1B1"
BREAKING: dict[str, Callable[[], Schedule | Program]] = {
    "sizes": lambda: replace(GOOD, num_slices=0),
    "update_interval": lambda: replace(GOOD, microbatches_per_update=1),
    "evaluation_without_updates": lambda: replace(
        forward_only(GOOD), weights=WeightPolicy.STASH, microbatches_per_update=1
    ),
    "streams_of_whole_sequences": lambda: replace(SLICED, weights=WeightPolicy.STASH, microbatches_per_update=1),
    "whole_updates": lambda: replace(STREAM, microbatches_per_update=3),
    "one_order_per_rank": lambda: replace(GOOD, orders=GOOD.orders[:1]),
    "actions_only": lambda: replace(GOOD, orders=(("0F0",), GOOD.orders[1])),
    "computations_only": lambda: schedule("0F0 0SEND_F0 0F1 0B0 0B1", RANK_1),
    "known_stages": lambda: schedule("0F0 0F1 0B0 0B1 2F0", RANK_1),
    "known_microbatches": lambda: schedule("0F0 0F1 0B0 0B1 0F2", RANK_1),
    "own_rank": lambda: schedule("0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1"),
    "known_slices": lambda: schedule("0F0.0 0F1 0B0 0B1", RANK_1),
    "once": lambda: schedule("0F0 0F1 0F1 0B0 0B1", RANK_1),
    "one_backward": lambda: schedule("0F0 0F1 0B0 0I0 0B1", RANK_1),
    "complete": lambda: schedule("0F0 0F1 0B0", RANK_1),
    "overlapped_pairs": lambda: replace(GOOD, overlapped=frozenset({(Action(0, Op.F, 0), Action(0, Op.B, 1))})),
    "same_computations": lambda: program("0B0", "0B1"),
    "messages_between_ranks": lambda: program("1B0", "1SEND_F0 1B0"),
    "messages_once": lambda: program("0SEND_F0", "0SEND_F0 0SEND_F0"),
    "messages_in_order": lambda: program("0SEND_F0", ""),
    "stage_actions_on_holders": lambda: program("0F0", "1UNSHARD 0F0", ZERO3),
    "gathers_of_the_strategy": lambda: program("0F0", "0UNSHARD 0F0"),
    "gathered_when_read": lambda: program("0UNSHARD", "", ZERO3),
    "gathers_alternate": lambda: program("0UNSHARD", "0UNSHARD 0UNSHARD", ZERO3),
    "sharded_at_the_end": lambda: program("0RESHARD", "", ZERO3),
    "reductions_cover_backwards": lambda: program("0REDUCE_GRAD1", "0REDUCE_GRAD0", ZERO3),
    "full_gradients_reduced_once": lambda: program("0B0", "0B0 0REDUCE_GRAD0", DataAxis(degree=2)),
    "backwards_are_reduced": lambda: program("0REDUCE_GRAD1", "", ZERO3),
    "shared_gradients_summed_once": lambda: program("0REDUCE_GRAD", "", tied=True),
    "updates_of_a_stream": lambda: program("0STEP0", "", of=STREAM),
    "moves_once": lambda: program("0B0", "0OFFLOAD0 0RELOAD0 0OFFLOAD0 0B0"),
    "activations_are_there": lambda: program("0B0", "0OFFLOAD0 0B0"),
}


def test_every_rule_has_something_that_breaks_it():
    assert BREAKING.keys() == {rule.name for rule in (*SCHEDULE_RULES, *PROGRAM_RULES)}


@pytest.mark.parametrize("name", BREAKING)
def test_a_rule_refuses_with_its_sentence(name):
    broken = BREAKING[name]()
    rule = next(rule for rule in (*SCHEDULE_RULES, *PROGRAM_RULES) if rule.name == name)
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    message = str(caught.value)
    kind = "program" if isinstance(broken, Program) else "schedule"
    assert message.startswith(f"{kind} {broken.name!r}: ")
    assert f": {rule.sentence}. " in message
    assert message.endswith(".")
    assert "\n" not in message


def test_programs_are_asked_the_rules_that_they_share_with_schedules():
    good = lower(PAIRED)
    pair = sorted(PAIRED.overlapped)[0]
    for broken in (
        replace(good, orders=good.orders[:1]),
        replace(good, orders=((0,), *good.orders[1:])),
        replace(good, orders=((*good.orders[0], Action(9, Op.STEP)), *good.orders[1:])),
        replace(
            good,
            orders=tuple(
                tuple(a for b in row for a in ((b, Action(0, Op.STEP)) if b == pair[0] else (b,)))
                for row in good.orders
            ),
        ),
    ):
        with pytest.raises(ScheduleError, match=r"^program 'dualpipev': "):
            check(broken)


def made(name: str) -> list[Schedule]:
    """Schedules of a family, on few and on more micro-batches, with slices and chunks where it has them."""
    family = schedules.FAMILIES[name]
    found = []
    for ranks, microbatches in ((1, 1), (2, 4), (3, 6), *(((4, 8),) if not family.sliced else ())):
        for slices in (1, 2) if family.sliced else (1,):
            try:
                found.append(family(num_ranks=ranks, num_microbatches=microbatches, num_slices=slices))
            except ScheduleError:
                continue
    assert len(found) >= 2
    return found


AXES = [
    DataAxis(degree=2, strategy=strategy, granularity=granularity, separate_master=master)
    for strategy in DataStrategy
    for granularity in (Granularity if strategy in (DataStrategy.ZERO2, DataStrategy.ZERO3) else (Granularity.STEP,))
    for master in (False, True)
]


@pytest.mark.parametrize("apart", [len(AXES), pytest.param(6, marks=pytest.mark.whole_grid)])
@pytest.mark.parametrize("name", [name for name in schedules.FAMILIES if name != "search"])
def test_every_pass_keeps_every_rule(name, apart):
    turn = 0
    for schedule in made(name):
        check(schedule)
        for changed in (
            merge_backwards(schedule),
            separate_units(schedule),
            forward_only(schedule),
            evaluation_schedule(schedule),
            repeat_steps(schedule, 2) if schedule.microbatches_per_update is None and name != "chimera" else schedule,
        ):
            check(changed)
            if changed.microbatches_per_update is None:
                flushed_passes(changed, AXES[turn % apart :: apart])
                turn += 1
            else:
                stream_passes(changed)


def flushed_passes(schedule: Schedule, axes: Sequence[DataAxis]) -> None:
    """The passes of `lower` one by one, each checked."""
    tied = ((0, schedule.num_stages - 1),) if schedule.num_stages > 1 else ()
    sent = insert_communication(schedule)
    check(sent)
    for data in (None, *axes):
        program = sent if data is None else insert_data_parallel(sent, data)
        check(program)
        summed = insert_gradient_reduction(program, tied)
        check(summed)
        assert summed == lower(schedule, tied_stages=tied, data=data)
        if not schedule.forward_only and data in (None, axes[0]):
            caps = [max(least, 1.0) for least in least_held(summed)]
            check(insert_offload(summed, caps))


def stream_passes(schedule: Schedule) -> None:
    """Before its updates are in, a stream's program breaks the rule about them, and no other."""
    sent = insert_communication(schedule)
    for rule in PROGRAM_RULES:
        if rule is not updates_of_a_stream:
            rule.ask(sent)
    with pytest.raises(ScheduleError, match=updates_of_a_stream.sentence):
        check(sent)
    updated = insert_updates(sent)
    check(updated)
    assert updated == lower(schedule)


def test_every_op_is_run_by_programs_that_are_legal_and_simulated():
    """What the runtime runs, the checker and the simulator accept: every op stands in a legal, simulated program."""
    split = schedules.from_orders("0F0 0F1 0I0 0W0 0B1\n1F0 1F1 1B0 1I1 1W1")
    zero3 = insert_offload(lower(split, tied_stages=((0, 1),), data=ZERO3), 1, beside=0)
    accepted: set[Op] = set()
    skips = lower(schedules.gpipe(num_ranks=3, num_microbatches=2), skips=(Skip(0, 2),))
    for program in (zero3, lower(STREAM), skips):
        check(program)
        timeline = simulate(program, Costs.uniform())
        ran = {span.action for rows in (timeline.spans, timeline.background) for row in rows for span in row}
        assert ran == {action for _, action in program.actions()}
        accepted |= {action.op for action in ran}
    assert accepted == set(Op)
