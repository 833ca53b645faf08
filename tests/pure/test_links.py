"""Bandwidth and shared links: worked by hand, against a clock that ticks, and the critical path through them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Placement, Schedule, peer_of
from pipeloom.ir.schedule import message_after
from pipeloom.ir.text import parse_orders
from pipeloom.passes import lower
from pipeloom.sim import Costs, Link, Network, Timeline, critical_path, simulate
from tests.pure import handmade

F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


def costs_of(stages: int, **more) -> Costs:
    more.setdefault("message_bytes", (1.0,) * stages)
    return Costs(forward=(1.0,) * stages, backward_input=(1.0,) * stages, backward_weight=(1.0,) * stages, **more)


def starts_of(timeline: Timeline) -> dict[str, float]:
    return {str(span.action): span.start for row in timeline.spans for span in row}


def test_a_message_takes_its_bytes_over_the_bandwidth_and_then_the_latency():
    schedule = schedules.gpipe(num_ranks=2, num_microbatches=2)
    network = Network(bytes_per_second=4.0, latency_seconds=0.25)
    costs = costs_of(2, message_bytes=(6.0, 99.0), gradient_message_bytes=(2.0, 99.0))
    for pipeline in (schedule, lower(schedule)):
        starts = starts_of(simulate(pipeline, costs, network))
        # 6 bytes take 1.5 s: 0F0 1-2.5, 0F1 waits 0.5 s for the link; gradients of 2 bytes take 0.5 s
        assert [starts[a] for a in ("1F0", "1F1", "1B0", "1B1")] == [2.75, 4.25, 5.25, 7.25]
        assert [starts[a] for a in ("0B0", "0B1")] == [8.0, 10.0]
    assert [t[1:] for t in simulate(schedule, costs, network).transfers] == [
        (0, 1, -1, 1.0, 1.0, 2.5, False),
        (0, 1, -1, 2.0, 2.5, 4.0, False),
        (1, 0, -1, 7.25, 7.25, 7.75, False),
        (1, 0, -1, 9.25, 9.25, 9.75, False),
    ]


def test_pairs_that_share_a_link_wait_for_each_other_first_come_first_served():
    orders = parse_orders("0F0 0B0\n1F0 1B0\n0F1 0B1\n1F1 1B1\n")
    schedule = Schedule(name="two", num_microbatches=2, placement=Placement(((0, 2), (1, 3))), orders=orders)
    shared = Network(links=(Link(ranks=frozenset({(0, 1), (2, 3)}), bytes_per_second=0.5),))
    starts = starts_of(simulate(schedule, costs_of(2), shared))
    assert (starts["1F0"], starts["1F1"]) == (3.0, 5.0)
    assert (starts["0B0"], starts["0B1"]) == (6.0, 8.0)  # the way back is no bottleneck
    alone = Network(links=tuple(Link(ranks=frozenset({pair}), bytes_per_second=0.5) for pair in ((0, 1), (2, 3))))
    starts = starts_of(simulate(schedule, costs_of(2), alone))
    assert (starts["1F0"], starts["1F1"]) == (3.0, 3.0)
    slow = replace(costs_of(2), rank_slowness=(1.5, 1, 1, 1))  # rank 2 now is first
    starts = starts_of(simulate(schedule, slow, shared))
    assert (starts["1F0"], starts["1F1"]) == (5.0, 3.0)


def test_without_overlap_sender_and_receiver_are_busy_while_a_message_is_transferred():
    schedule = schedules.gpipe(num_ranks=2, num_microbatches=2)
    network = Network(bytes_per_second=2.0, overlap_communication=False)
    for pipeline in (schedule, lower(schedule)):
        timeline = simulate(pipeline, costs_of(2), network)
        starts = starts_of(timeline)
        # 0F0 0-1, sends to 1.5, 0F1 1.5-2.5, sends to 3; rank 1 receives 1-1.5, 1F0 to 2.5, receives 2.5-3, 1F1 to 4
        assert [starts[a] for a in ("0F1", "1F0", "1F1", "1B0", "1B1")] == [1.5, 1.5, 3.0, 4.0, 6.5]
        assert [starts[a] for a in ("0B0", "0B1")] == [6.5, 9.0]
        assert timeline.makespan == 11.0
    lowered = {str(span.action): span for row in simulate(lower(schedule), costs_of(2), network).spans for span in row}
    assert lowered["0SEND_F0"][1:] == (1.0, 1.5)
    assert lowered["1RECV_F0"][1:] == (0.0, 1.5)


def test_messages_of_slices_are_parts():
    orders = parse_orders("0F0.0 0F0.1 0B0.1 0B0.0\n1F0.0 1F0.1 1B0.1 1B0.0\n")
    schedule = Schedule(name="cut", num_microbatches=1, num_slices=2, placement=Placement.loop(2), orders=orders)
    timeline = simulate(schedule, costs_of(2), Network(bytes_per_second=1.0))
    assert {transfer.end - transfer.start for transfer in timeline.transfers} == {0.5}


@st.composite
def cases(draw):
    """A random schedule with whole seconds, bytes and latencies, and links that ranks share at random."""
    schedule = draw(handmade.schedules(max_slices=1))
    stages, ranks = schedule.num_stages, schedule.num_ranks
    rng = random.Random(draw(st.integers(0, 2**32)))

    def some(low: int, high: int, count: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(low, high)) for _ in range(count))

    costs = Costs(
        forward=some(1, 3, stages),
        backward_input=some(1, 3, stages),
        backward_weight=some(1, 3, stages),
        message_bytes=some(1, 4, stages),
        gradient_message_bytes=some(1, 4, stages),
    )
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    groups: dict[int, set[tuple[int, int]]] = {}
    for pair in pairs:
        groups.setdefault(rng.randrange(3), set()).add(pair)
    links = tuple(Link(ranks=frozenset(group), bytes_per_second=1.0) for group in groups.values())
    latency = tuple(tuple(some(0, 2, ranks)) for _ in range(ranks))
    overlap = draw(st.booleans())
    return schedule, costs, Network(links=links, latency_seconds=latency, overlap_communication=overlap)


def ticking(schedule: Schedule, costs: Costs, network: Network) -> dict[Action, int]:
    """The start of every action by a clock that ticks in whole seconds; every action and transfer takes one or more."""
    seconds, (there, back) = costs.seconds(schedule), costs.bytes_sent(schedule)
    link_of, latency = network.shared_links(schedule.num_ranks), network.latency(schedule.num_ranks)
    blocking = not network.overlap_communication
    todo = [list(order) for order in schedule.orders]
    doing: list[tuple[str, Action, int] | None] = [None] * schedule.num_ranks  # what, of which action, until
    received: list[set[Action]] = [set() for _ in todo]
    done: set[Action] = set()
    queues: dict[int, list[tuple[Action, int, int]]] = {number: [] for number in range(len(network.links))}
    line_until = dict.fromkeys(queues, 0)
    head: dict[Action, tuple[int, int]] = {}  # of each value that travels: when it may be taken, and for how long
    starts: dict[Action, int] = {}
    now = -1
    while any(todo):
        now += 1
        for rank, job in enumerate(doing):
            if job is None or job[2] != now:
                continue
            doing[rank] = None
            if job[0] == "receive":
                received[rank].add(job[1])
            if job[0] != "compute":
                continue
            done.add(job[1])
            send = message_after(job[1], schedule)
            if send is not None:
                pair = (rank, peer_of(send, schedule.placement))
                size = there[send.stage] if send.op is Op.SEND_F else back[send.stage - 1]
                queues[link_of[pair]].append((job[1], int(size), int(latency[pair[0]][pair[1]])))
                if blocking:
                    doing[rank] = ("send", job[1], -1)
        for number, queue in queues.items():
            if queue and line_until[number] <= now:
                value, size, lag = queue.pop(0)
                line_until[number] = now + size
                head[value] = (now + lag, size) if blocking else (now + size + lag, 0)
                if blocking:
                    sender = next(r for r, job in enumerate(doing) if job is not None and job[:2] == ("send", value))
                    doing[sender] = ("send", value, now + size)
        for rank, order in enumerate(todo):
            if doing[rank] is not None or not order:
                continue
            action = order[0]
            remote = [n for n in handmade.needs_of(action, schedule) if n not in schedule.orders[rank]]
            here = [n for n in handmade.needs_of(action, schedule) if n in schedule.orders[rank]]
            if not all(need in done for need in here):
                continue
            if not all(need in head and head[need][0] <= now for need in remote):
                continue
            open_ones = [need for need in remote if head[need][1] and need not in received[rank]]
            if open_ones:
                doing[rank] = ("receive", open_ones[0], now + head[open_ones[0]][1])
                continue
            starts[order.pop(0)] = now
            doing[rank] = ("compute", action, now + int(seconds[action.op][action.stage]))
    return starts


@settings(deadline=None, max_examples=80)
@given(cases())
def test_links_are_what_a_ticking_clock_says(case):
    schedule, costs, network = case
    timeline = simulate(schedule, costs, network)
    found = {span.action: span.start for row in timeline.spans for span in row}
    assert found == ticking(schedule, costs, network)


@settings(deadline=None, max_examples=80)
@given(cases())
def test_the_critical_path_goes_through_link_waits(case):
    """On the path each piece begins when the one before it has ended, latencies between ranks aside."""
    schedule, costs, network = case
    timeline = simulate(schedule, costs, network)
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    path = critical_path(again)
    assert path == critical_path(timeline)
    assert path[0][1].start == 0.0
    assert path[-1][1].end == timeline.makespan
    assert len({span.action for _, span in path}) == len(path)
    blocking = not network.overlap_communication
    for (_, first), (rank, second) in itertools.pairwise(path):
        crossed = first.action.op in (Op.SEND_F, Op.SEND_B) and second.action.op in (F, B, I)
        source = next(t.source for t in timeline.transfers if t.action == first.action) if crossed else rank
        if source == rank:
            assert first.end == second.start
        else:
            lag = network.latency(schedule.num_ranks)[source][rank]
            # the receiver may take the message while it comes in, and another one after it
            assert first.end + lag == second.start or (blocking and first.end + lag <= second.start)


def test_the_path_names_the_message_that_held_up_the_link():
    orders = parse_orders("0F0 0B0\n1F0 1B0\n0F1 0B1\n1F1 1B1\n")
    schedule = Schedule(name="two", num_microbatches=2, placement=Placement(((0, 2), (1, 3))), orders=orders)
    shared = Network(links=(Link(ranks=frozenset({(0, 1), (2, 3)}), bytes_per_second=0.5),))
    path = [(rank, str(span.action)) for rank, span in critical_path(simulate(schedule, costs_of(2), shared))]
    assert path == [(0, "0F0"), (0, "0SEND_F0"), (2, "0SEND_F1"), (3, "1F1"), (3, "1B1"), (2, "0B1")]


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize("bandwidth", [None, 8.0])
def test_the_critical_path_is_unbroken_through_overlapped_units(latency, bandwidth):
    """Where a path leaves a unit to another rank, it has passed both members, as the result is there at its end."""
    for name, p, m in (("dualpipe", 4, 10), ("dualpipev", 3, 9)):
        schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
        stages = schedule.num_stages
        costs = costs_of(stages, overlap=0.75)
        timeline = simulate(schedule, costs, Network(latency_seconds=latency, bytes_per_second=bandwidth))
        path = critical_path(timeline)
        assert (path[0][1].start, path[-1][1].end) == (0.0, timeline.makespan)
        members = {action for pair in timeline.overlapped for action in pair}
        for (rank, first), (other, second) in itertools.pairwise(path):
            lag = latency if rank != other and second.action.op not in (Op.SEND_F, Op.SEND_B) else 0.0
            assert second.start == pytest.approx(first.end + lag, abs=1e-9)
            if rank != other and first.action in members:
                assert first.action.op is not F
        assert any(span.action in members for _, span in path)


def test_impossible_links_are_refused():
    pair = frozenset({(0, 1)})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"bytes_per_second=.*must be finite and > 0"):
            Link(ranks=pair, bytes_per_second=bad)
        with pytest.raises(InputError, match=r"bytes_per_second=.*must be finite and > 0"):
            Network(bytes_per_second=bad)
        with pytest.raises(InputError, match=r"rank_slowness.*slowdown factor must be > 0"):
            costs_of(2, rank_slowness=(1.0, bad))
    with pytest.raises(InputError, match="a link has no ranks: must have at least one pair"):
        Link(ranks=frozenset(), bytes_per_second=1.0)
    with pytest.raises(InputError, match="joins rank 1 with itself"):
        Link(ranks=frozenset({(1, 1)}), bytes_per_second=1.0)
    with pytest.raises(InputError, match=r"ranks \(0, 1\) are in two links"):
        Network(links=(Link(ranks=pair, bytes_per_second=1.0),) * 2)
    schedule = schedules.gpipe(num_ranks=2, num_microbatches=1)
    with pytest.raises(InputError, match=r"link 0 joins ranks \(0, 5\): ranks must be in 0..1"):
        simulate(schedule, costs_of(2), Network(links=(Link(ranks=frozenset({(0, 5)}), bytes_per_second=1.0),)))
    with pytest.raises(InputError, match="no message_bytes"):
        simulate(schedule, Costs.uniform(), Network(bytes_per_second=1.0))
    with pytest.raises(InputError, match="message_bytes has 3 entries"):
        simulate(schedule, replace(costs_of(2), message_bytes=(1.0,) * 3), Network(bytes_per_second=1.0))
    with pytest.raises(InputError, match="without message_bytes"):
        costs_of(2, message_bytes=None, gradient_message_bytes=(1.0, 1.0))
    with pytest.raises(InputError, match=r"message_bytes\[[0-9]+\]=-1\.0: must be a number of bytes from 0"):
        costs_of(2, message_bytes=(1.0, -1.0))
    with pytest.raises(InputError, match="rank_slowness has 3 entries: schedule 'gpipe' has 2 ranks"):
        simulate(schedule, costs_of(2, rank_slowness=(1.0,) * 3))
