"""Values that skip stages as data: routes, messages, the checker, the simulator, memory and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipeloom as pl
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Op, Placement, Program, Skip, SkippingValue, check, routes
from pipeloom.ir.recompute import Recompute
from pipeloom.ir.text import format_orders, parse_action, parse_orders
from pipeloom.passes import lower
from pipeloom.plan.memory import LayerMemory, MemoryModel, memory_of_ranks
from pipeloom.report.perfetto import trace
from pipeloom.report.svg import timeline_svg
from pipeloom.sim.critical_path import critical_path

SKIPS = (Skip(0, 2), Skip(0, 3, has_gradient=False))


def make(name: str = "1f1b", **sizes) -> Program:
    return lower(pl.schedules.build(name, **({"num_ranks": 4, "num_microbatches": 4} | sizes)), skips=SKIPS)


def test_a_value_takes_the_shortest_way_to_every_rank() -> None:
    values = [SkippingValue("a", 0, (2, 3, 5)), SkippingValue("b", 1, (3,), has_gradient=False)]
    assert routes(values, Placement.loop(2, 3)) == {
        Skip(0, 2): ("a",),
        Skip(0, 3): ("a",),
        Skip(1, 3, has_gradient=False): ("b",),
        Skip(3, 5): ("a",),
    }
    assert list(routes(values[:1], Placement.loop(6))) == [Skip(0, 2), Skip(0, 3), Skip(0, 5)]


def test_messages_stand_around_their_computations() -> None:
    program = make(num_microbatches=1)
    check(program)
    assert format_orders(program.orders).splitlines() == [
        "0F0 0SEND_F0 0SEND_SKIP0.2 0SEND_SKIP0.3 0RECV_B0 0RECV_SKIP_GRAD0.2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2RECV_SKIP0.0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2SEND_SKIP_GRAD0.0",
        "3RECV_F0 3RECV_SKIP0.0 3F0 3B0 3SEND_B0",
    ]
    assert parse_orders(format_orders(program.orders)) == program.orders
    assert parse_action("0SEND_SKIP1.3").other_end() == parse_action("3RECV_SKIP1.0")


def test_without_skips_a_program_is_as_before() -> None:
    schedule = pl.schedules.build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=2)
    assert lower(schedule, skips=()) == lower(schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda order: [a for a in order if str(a) != "2RECV_SKIP0.0"],
            "is sent by 0SEND_SKIP0.2 but",
        ),
        (lambda order: [parse_action("2RECV_SKIP0.1") if str(a) == "2RECV_SKIP0.0" else a for a in order], "1"),
        (lambda order: [*order, parse_action("3SEND_SKIP_GRAD0.0")] if order[0].stage == 3 else order, "along a skip"),
        (lambda order: [a._replace(slice=None) if str(a) == "2RECV_SKIP0.0" else a for a in order], "other end"),
    ],
)
def test_what_the_checker_refuses(change, message: str) -> None:
    program = make()
    with pytest.raises(ScheduleError, match=message):
        check(replace(program, orders=tuple(tuple(change(order)) for order in program.orders)))


@pytest.mark.parametrize("skips", [(Skip(2, 1),), (Skip(0, 9),), (Skip(0, 2), Skip(0, 2, has_gradient=False))])
def test_skips_lead_to_a_later_stage(skips) -> None:
    with pytest.raises(ScheduleError, match="skip"):
        lower(pl.schedules.build("1f1b", num_ranks=4, num_microbatches=4), skips=skips)


def test_a_swapped_receive_is_noticed() -> None:
    program = make(num_microbatches=2)
    orders = [list(order) for order in program.orders]
    places = [i for i, a in enumerate(orders[2]) if a.op is Op.RECV_SKIP]
    orders[2][places[0]], orders[2][places[1]] = orders[2][places[1]], orders[2][places[0]]
    with pytest.raises(ScheduleError, match="one order"):
        check(replace(program, orders=tuple(map(tuple, orders))))


def test_bytes_take_time_on_links() -> None:
    program = make()
    costs = pl.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, message_bytes=(0.0,) * 4)
    with pytest.raises(InputError, match="skip_bytes"):
        pl.simulate(program, costs, pl.Network(bytes_per_second=1.0))
    free = replace(costs, skip_bytes={(0, 2): 0.0, (0, 3): 0.0})
    slow = replace(costs, skip_bytes={(0, 2): 30.0, (0, 3): 0.0})
    network = pl.Network(bytes_per_second=10.0)
    fast, late = (pl.simulate(program, each, network) for each in (free, slow))
    assert fast.makespan == pl.simulate(program, costs).makespan
    start = {str(span.action): span.start for span in late.compute_spans[2]}
    assert start["2F0"] == 1.0 + 3.0  # the value is made in 1 s and takes 3 s, the ordinary way takes 2 s
    moved = [transfer for transfer in late.transfers if transfer.action.op in (Op.SEND_SKIP, Op.SEND_SKIP_GRAD)]
    assert {(t.source, t.target) for t in moved} == {(0, 2), (0, 3), (2, 0)}
    assert any(span.action.op is Op.SEND_SKIP for _, span in critical_path(late))
    names = [event["name"] for event in trace(late)["traceEvents"] if event["ph"] == "s"]
    assert names.count("activation") == 4 * 3 + 4 * 2
    assert "<svg" in timeline_svg([late], critical=True)


def test_memory_of_values_in_flight() -> None:
    layer = LayerMemory(
        name="a", parameters={}, kept_bytes=dict.fromkeys(Recompute, 0.0), recompute_share=dict.fromkeys(Recompute, 0.0)
    )
    model = MemoryModel(stages=[[layer]] * 4, skip_bytes={(0, 2): 100.0, (0, 3): 1.0})
    found = [rank.kinds["skips"] for rank in memory_of_ranks(make(num_microbatches=8), model)]
    assert found == [4 * 101.0, 0.0, 0.0, 0.0]  # 1f1b has four micro-batches in flight on its first rank
