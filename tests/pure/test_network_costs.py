"""Transfers and the seconds that they block ranks, against hand calculations."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.ir import Placement
from pipeloom.schedules import Conditions
from pipeloom.schedules.search.bounds import lower_bound
from pipeloom.schedules.search.operations import Work
from pipeloom.sim import Costs, Link, Network

ONES = (1.0, 1.0, 1.0)
COSTS = Costs(
    forward=ONES,
    backward_input=ONES,
    backward_weight=ONES,
    message_bytes=(8.0, 20.0, 99.0),  # the last stage sends nothing on
    gradient_message_bytes=(4.0, 10.0, 99.0),
)
THREE = schedules.gpipe(num_ranks=3, num_microbatches=2)


def test_blocking_messages_keep_sender_and_receiver_busy():
    """2 bytes/s: stage 0 -> 1 takes 4 s, 1 -> 2 takes 10 s; back 1 -> 0 takes 2 s, 2 -> 1 takes 5 s.

    The middle stage receives and sends in each direction, the outer ones do one of both.
    """
    network = Network(bytes_per_second=2.0, overlap_communication=False)
    assert network.transfer_seconds(THREE, COSTS) == ((0, 4, 0), (2, 0, 10), (0, 5, 0))
    assert network.busy_seconds(THREE, COSTS) == ((4, 14, 10), (2, 7, 5))


def test_messages_that_overlap_keep_nobody_busy():
    network = Network(bytes_per_second=2.0)
    assert network.busy_seconds(THREE, COSTS) == ((0, 0, 0), (0, 0, 0))
    assert Network(overlap_communication=False).busy_seconds(THREE, COSTS) == ((0, 0, 0), (0, 0, 0))


def test_each_direction_takes_the_bandwidth_of_its_own_link():
    """Only 1 -> 0 and 1 -> 2 are shared, at 1 byte/s; 0 -> 1 and 2 -> 1 go at 2."""
    shared = Link(ranks=frozenset({(1, 0), (1, 2)}), bytes_per_second=1.0)
    network = Network(bytes_per_second=2.0, links=(shared,), overlap_communication=False, latency_seconds=0.5)
    assert network.transfer_seconds(THREE, COSTS) == ((0, 4, 0), (4, 0, 20), (0, 5, 0))
    assert network.busy_seconds(THREE, COSTS) == ((4, 24, 20), (4, 9, 5))
    assert network.message_seconds(THREE, COSTS) == ((0.5, 4.5, 0.5), (4.5, 0.5, 20.5), (0.5, 5.5, 0.5))


def test_replicas_count_their_fastest_pair():
    """Stage 0 on ranks 0 and 1, stage 1 on rank 2: 0 -> 2 at 8 bytes/s, the others at 2 and 1."""
    placement = Placement.replicated((2, 1))
    schedule = schedules.pipedream(num_ranks=3, num_microbatches=2, replicas=(2, 1))
    assert schedule.placement == placement
    links = (
        Link(ranks=frozenset({(0, 2)}), bytes_per_second=8.0),
        Link(ranks=frozenset({(2, 0)}), bytes_per_second=1.0),
    )
    network = Network(bytes_per_second=2.0, links=links, overlap_communication=False)
    costs = Costs(forward=(1.0, 1.0), backward_input=(1.0, 1.0), backward_weight=(1.0, 1.0), message_bytes=(8.0, 0.0))
    assert network.transfer_seconds(schedule, costs) == ((0, 0, 1), (0, 0, 4), (8, 4, 0))
    assert network.busy_seconds(schedule, costs) == ((1, 1), (4, 4))


def test_chunks_of_one_rank_send_nothing_and_pairs_count_their_smallest_message():
    """Four stages on two ranks in a V: 0, 3 | 1, 2. Between the ranks go messages of stages 0 and 2."""
    schedule = schedules.zb_v(num_ranks=2, num_microbatches=4)
    four = (1.0,) * 4
    costs = Costs(forward=four, backward_input=four, backward_weight=four, message_bytes=(8.0, 1.0, 6.0, 0.0))
    network = Network(bytes_per_second=2.0, overlap_communication=False)
    # 0 -> 1: F of stage 0 (8 bytes), B of stage 3 (6); 1 -> 0: F of stage 2 (6), B of stage 1 (8)
    assert network.transfer_seconds(schedule, costs) == ((0, 3), (3, 0))
    assert network.busy_seconds(schedule, costs) == ((3, 3, 3, 3), (3, 3, 3, 3))


@pytest.mark.parametrize(
    ("p", "m", "latency", "cap", "bound"),
    [
        (1, 3, 0.0, 1.0, 9.0),  # one rank that never waits
        (3, 1, 0.0, 1.0, 7.0),  # F F F I I I W
        (3, 1, 0.5, 1.0, 9.0),  # and four messages
        (2, 4, 0.0, 9.0, 13.0),  # rank 1 begins at 1, with 12 s of work
        (2, 4, 0.5, 9.0, 13.5),
        (2, 2, 0.0, 1.0, 10.0),  # one at a time: F0 on rank 0 at 0 and 5, where W has freed its memory
    ],
)
def test_the_lower_bound_of_equal_stages(p, m, latency, cap, bound):
    conditions = Conditions.uniform(Placement.loop(p), latency=latency, memory_limit=cap)
    assert lower_bound(Work(Placement.loop(p), m, conditions)) == pytest.approx(bound)
