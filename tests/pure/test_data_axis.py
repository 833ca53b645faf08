"""Copies of a pipeline: where parameters are gathered and gradients reduced, what is refused, and what it takes."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules as families
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op, Program, check
from pipeloom.ir.text import format_orders, parse_orders
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import forward_only, insert_communication, insert_data_parallel, insert_offload, lower
from pipeloom.sim import Costs, Network, Timeline, critical_path, parse_costs, simulate
from pipeloom.train.config.sections import ParallelConfig
from tests.pure.handmade import schedules

STEP, CHUNK, MICROBATCH = Granularity
ZERO2, ZERO3 = DataStrategy.ZERO2, DataStrategy.ZERO3
AXES = [
    DataAxis(degree=4, strategy=strategy, granularity=granularity, separate_master=master)
    for strategy in DataStrategy
    for granularity in (Granularity if strategy in (ZERO2, ZERO3) else (STEP,))
    for master in (False, True)
]
FLUSHED = [name for name, family in families.FAMILIES.items() if name != "search" and not family.stream]


def zero3(granularity: Granularity = STEP, degree: int = 2) -> DataAxis:
    return DataAxis(degree=degree, strategy=ZERO3, granularity=granularity)


def bfs(data: DataAxis, num_microbatches: int = 2) -> Program:
    return lower(families.build("bfs", num_ranks=1, num_microbatches=num_microbatches, num_chunks=3), data=data)


def counts(program: Program) -> Counter[tuple[Op, int, int]]:
    """How often each op stands for each stage on each rank."""
    return Counter((action.op, action.stage, rank) for rank, action in program.actions())


# --- where they stand -----------------------------------------------------------------------------------------------


def test_once_a_step_parameters_are_gathered_at_the_front_and_freed_behind_their_last_use():
    assert format_orders(bfs(zero3()).orders) == (
        "0UNSHARD 1UNSHARD 2UNSHARD 0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD1 "
        "1B0 1B1 1RESHARD 1REDUCE_GRAD1 0B0 0B1 0RESHARD 0REDUCE_GRAD1\n"
    )


def test_chunks_are_gathered_one_run_ahead_and_their_gradients_reduced_behind_each_run():
    assert format_orders(bfs(zero3(CHUNK)).orders) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 1RESHARD 1UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD1 "
        "0UNSHARD 1B0 1B1 1RESHARD 1REDUCE_GRAD1 0B0 0B1 0RESHARD 0REDUCE_GRAD1\n"
    )
    unhurried = insert_data_parallel(insert_communication(bfs(zero3()).schedule), zero3(CHUNK), ahead=0)
    check(unhurried)
    assert format_orders(unhurried.orders).startswith("0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1RESHARD 2UNSHARD")


def test_a_weight_gradient_needs_no_parameters_and_breaks_no_run():
    split = families.build("zb-h1", num_ranks=2, num_microbatches=2)
    assert format_orders(lower(split, data=zero3(CHUNK)).orders).splitlines()[1] == (
        "1UNSHARD 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1RESHARD 1W0 1W1 1REDUCE_GRAD1"
    )
    assert format_orders(lower(split, data=zero3(MICROBATCH)).orders).splitlines()[1] == (
        "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1I0 1SEND_B0 1RESHARD 1UNSHARD 1RECV_F1 1F1 1RESHARD "
        "1UNSHARD 1I1 1SEND_B1 1RESHARD 1W0 1REDUCE_GRAD0 1W1 1REDUCE_GRAD1"
    )


def test_masters_are_copied_once_at_the_start_and_nothing_is_freed():
    schedule = families.build("1f1b", num_ranks=2, num_microbatches=2)
    for strategy in (DataStrategy.DDP, DataStrategy.ZERO1, ZERO2, DataStrategy.PARAMETER_SERVER):
        program = lower(schedule, data=DataAxis(degree=2, strategy=strategy, separate_master=True))
        assert [order[0] for order in program.orders] == [Action(0, Op.UNSHARD), Action(1, Op.UNSHARD)]
        assert not any(action.op is Op.RESHARD for _, action in program.actions())
    plain = lower(schedule, data=DataAxis(degree=2))
    assert not any(action.op is Op.UNSHARD for _, action in plain.actions())


@pytest.mark.parametrize("name", FLUSHED)
def test_every_schedule_gathers_and_reduces_as_often_as_it_should(name):
    ranks = 4
    for turn, (microbatches, slices) in enumerate(((8, 1), (9, 2 if families.FAMILIES[name].sliced else 1))):
        if name in ("dualpipe", "chimera"):
            microbatches -= microbatches % 2
        if name.endswith("interleaved"):
            microbatches = 8
        schedule = families.build(name, num_ranks=ranks, num_microbatches=microbatches, num_slices=slices)
        places = [(stage, rank) for stage, holders in enumerate(schedule.placement.replicas) for rank in holders]
        for data in AXES[turn::2]:
            program = lower(schedule, data=data)
            check(program)
            found = counts(program)
            assert {key[1:] for key in found if key[0] is Op.REDUCE_GRAD} == set(places)
            for place in places:
                here = [a for a in program.orders[place[1]] if a.stage == place[0]]
                units = schedule.partners
                reads = sum(a.op in (Op.F, Op.B, Op.I) for a in here)
                reads -= sum(a in units and units[a].stage == a.stage for a in here)  # both in one unit
                adds = sum(a.op in (Op.B, Op.W) for a in here)
                shared = any(a.op is Op.REDUCE_GRAD and a.microbatch is None for a in here)
                gathers, frees, reductions = (found[op, *place] for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD))
                reductions -= shared
                assert frees == (gathers if data.strategy.shards_parameters else 0)
                if data.granularity is STEP:
                    assert (gathers, reductions) == (int(data.unshards), 1)
                elif data.granularity is MICROBATCH:
                    assert (gathers, reductions) == (reads if data.strategy.shards_parameters else 1, adds)
                else:
                    assert 1 <= gathers <= reads
                    assert 1 <= reductions <= adds
                if name == "bfs" and data == zero3(CHUNK, 4):
                    last_chunk = place[0] + ranks >= schedule.num_stages
                    assert (gathers, reductions) == (1 if last_chunk else 2, 1)


def test_an_evaluation_gathers_and_reduces_nothing():
    for data in AXES:
        program = lower(forward_only(families.build("interleaved", num_ranks=2, num_microbatches=4)), data=data)
        check(program)
        ops = {action.op for _, action in program.actions()}
        assert Op.REDUCE_GRAD not in ops
        assert (Op.UNSHARD in ops) is data.unshards


@given(schedules(), st.sampled_from(AXES), st.booleans())
@settings(max_examples=60, deadline=None)
def test_on_random_schedules_too_and_their_text_reads_back(schedule, data, tied):
    program = lower(
        schedule, tied_stages=((0, schedule.num_stages - 1),) if tied and schedule.num_stages > 1 else (), data=data
    )
    check(program)
    assert parse_orders(format_orders(program.orders)) == program.orders
    for ahead in (0, 2):
        check(insert_data_parallel(insert_communication(schedule), data, ahead=ahead))


@given(schedules(), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_no_more_stages_are_gathered_at_once_than_prefetching_says(schedule, ahead):
    program = insert_data_parallel(insert_communication(schedule), zero3(CHUNK), ahead=ahead)
    for order in program.orders:
        there, most = 0, 0
        for action in order:
            there += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
            most = max(most, there)
        assert most <= ahead + 1


# --- what is refused ------------------------------------------------------------------------------------------------


def broken(program: Program, *words: str, drop: tuple[str, ...] = (), at: int | None = None) -> Program:
    """A one-rank program with actions put in or left out."""
    order = [action for action in program.orders[0] if str(action) not in drop]
    new = parse_orders(" ".join(words) + "\n")[0]
    place = len(order) if at is None else at
    return replace(program, orders=((*order[:place], *new, *order[place:]),))


def test_parameters_that_are_not_there_and_gradients_that_are_not_reduced_are_refused():
    program = bfs(zero3())
    ddp = bfs(DataAxis(degree=2))
    fine = bfs(zero3(MICROBATCH))
    for wrong, said in (
        (broken(program, drop=("1UNSHARD",)), "1F0 on rank 0 without parameters: .*Add 1UNSHARD before it"),
        (broken(program, "1UNSHARD", at=3), "1UNSHARD on rank 0, where the parameters are there already: .* alternate"),
        (broken(program, "1RESHARD"), "1RESHARD on rank 0, where the parameters are not there: .* alternate"),
        (broken(program, drop=("0RESHARD",)), "0RESHARD is missing"),
        (broken(program, "1UNSHARD0", at=0), "1UNSHARD0 on rank 0: parameters are gathered for all micro-batches"),
        (broken(program, "7UNSHARD", at=0), "one of the stages 0..2"),
        (replace(program, data=None), "0UNSHARD on rank 0 without a data axis"),
        (broken(ddp, "0UNSHARD", at=0), "with ddp, which keeps full parameters"),
        (broken(bfs(DataAxis(degree=2, strategy=ZERO2)), "0RESHARD"), "with zero2, which keeps full parameters"),
        (broken(ddp, drop=("1REDUCE_GRAD1",)), "1REDUCE_GRAD1 is missing"),
        (broken(ddp, "1REDUCE_GRAD1"), "1REDUCE_GRAD1 on rank 0, with no backward since"),
        (
            broken(ddp, "2REDUCE_GRAD0", drop=("2REDUCE_GRAD1",)),
            "2REDUCE_GRAD0 on rank 0, where the last backward is 2B1",
        ),
        (broken(ddp, "2REDUCE_GRAD0", at=7), "2REDUCE_GRAD1 on rank 0: .* reduced once, or they would be summed twice"),
        (broken(fine, drop=("2REDUCE_GRAD1",)), "2REDUCE_GRAD1 is missing"),
    ):
        with pytest.raises(ScheduleError, match=said) as error:
            check(wrong)
        assert "\n" not in str(error.value)


def test_copies_reduce_before_ranks_with_the_same_parameters_sum():
    schedule = families.build("1f1b", num_ranks=2, num_microbatches=2)
    program = lower(schedule, tied_stages=((0, 1),), data=DataAxis(degree=2))
    check(program)
    assert [str(action) for action in program.orders[0][-2:]] == ["0REDUCE_GRAD1", "0REDUCE_GRAD"]
    swapped = (*program.orders[0][:-2], program.orders[0][-1], program.orders[0][-2])
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD1 on rank 0 comes after the sum of stages"):
        check(replace(program, orders=(swapped, program.orders[1])))


def test_streams_have_no_data_axis():
    stream = families.build("pipedream", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="data parallelism needs a synchronous schedule"):
        lower(stream, data=DataAxis(degree=2))


def test_torch_reads_what_is_gathered_once_a_step_and_nothing_finer():
    program = lower(families.build("interleaved", num_ranks=2, num_microbatches=2), data=zero3())
    text = to_csv(program)
    assert text.splitlines()[0].startswith("0UNSHARD,0F0,0SEND_F0,")
    assert Counter(text.replace("\n", ",").split(","))["2REDUCE_GRAD"] == 1
    assert from_csv(text).orders == program.schedule.orders
    with pytest.raises(ScheduleError, match="once per step"):
        to_csv(lower(program.schedule, data=zero3(CHUNK)))


# --- what it takes --------------------------------------------------------------------------------------------------


def costs(stages: int = 2, **more) -> Costs:
    """F, I and W take 1 s each; a stage has 12 bytes of parameters."""
    ones = (1.0,) * stages
    more.setdefault("parameter_bytes", (12.0,) * stages)
    return Costs(forward=ones, backward_input=ones, backward_weight=ones, **more)


def ends_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.action): span[1:] for row in timeline.background for span in row}


GPIPE = families.build("gpipe", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("strategy", "gather", "reduce"),
    [
        (DataStrategy.DDP, 0.0, 2 * (3 / 4 * 12 / 3 + 3 * 0.5)),  # an all-reduce is a reduce-scatter and an all-gather
        (DataStrategy.PARAMETER_SERVER, 3 * 12 / 3 + 0.5, 3 * 12 / 3 + 0.5),
        (DataStrategy.ZERO1, 3 / 4 * 12 / 3 + 3 * 0.5, 3 / 4 * 12 / 3 + 3 * 0.5),
    ],
)
def test_collectives_take_their_bytes_over_the_bandwidth_and_a_latency_for_every_round(strategy, gather, reduce):
    """Four copies, 3 bytes a second, half a second a message."""
    network = Network(data_bytes_per_second=3.0, data_latency_seconds=0.5)
    timeline = simulate(lower(GPIPE, data=DataAxis(degree=4, strategy=strategy)), costs(), network)
    found = ends_of(timeline)
    start = gather  # of 0F0; rank 1 gathers in the time of it
    assert found.get("0UNSHARD", (0.0, 0.0)) == (0.0, gather)
    assert [row[0].start for row in timeline.compute_spans] == [start, start + 1]
    # 0F0 0F1 idle 2 0B0 0B1: GPipe of two micro-batches takes 9 s of F = 1 and B = 2
    assert timeline.compute_spans[0][-1].end == start + 9
    assert found["1REDUCE_GRAD1"] == (start + 7, start + 7 + reduce)
    assert found["0REDUCE_GRAD1"] == (start + 9, start + 9 + reduce)
    assert timeline.makespan == start + 9 + reduce  # the step ends with the last reduction
    assert timeline.ideal_seconds == 6.0  # which is no computing
    assert timeline.bubble_fraction == pytest.approx(1 - 6 / timeline.makespan)


def test_a_link_does_one_thing_after_the_other_and_gathers_beside_computations():
    """One rank, three chunks, one run ahead; a gather takes 6 s of 2 copies, a reduction 3 s: gradients of 6 bytes."""
    program = bfs(zero3(CHUNK))
    network = Network(data_bytes_per_second=1.0)
    timeline = simulate(program, costs(3, gradient_bytes=(6.0,) * 3), network)
    rows = [(str(span.action), *span[1:]) for span in timeline.background[0]]
    assert rows == [
        ("0UNSHARD", 0, 6),
        ("1UNSHARD", 6, 12),  # in the time of 0F0 and 0F1
        ("2UNSHARD", 12, 18),
        ("1UNSHARD", 18, 24),  # begun when 1RESHARD has freed it, at 14
        ("2REDUCE_GRAD1", 24, 27),  # 2B1 ended at 24
        ("0UNSHARD", 27, 33),
        ("1REDUCE_GRAD1", 33, 36),  # 1B0 began at 24, and 1B1 ended at 28
        ("0REDUCE_GRAD1", 37, 40),
    ]
    starts = {str(span.action): span.start for span in timeline.spans[0]}
    assert [starts[a] for a in ("0F0", "1F0", "2F0", "2B0", "1B0", "0B0")] == [6, 12, 18, 20, 24, 33]
    assert timeline.makespan == 40


def test_one_copy_needs_no_network():
    network = Network(data_bytes_per_second=1.0, data_latency_seconds=1.0)
    for data in AXES:
        timeline = simulate(lower(GPIPE, data=replace(data, degree=1)), costs(), network)
        assert timeline.makespan == 9.0


def test_ranks_with_the_same_parameters_sum_when_the_copies_have():
    network = Network(data_bytes_per_second=2.0)
    program = lower(GPIPE, tied_stages=((0, 1),), data=DataAxis(degree=2))
    timeline = simulate(program, costs(), network)
    last = timeline.spans[1][-1]
    assert (str(last.action), last.start) == ("1REDUCE_GRAD", 7 + 6.0)  # its own copies took 2 * 12 / 2 / 2
    assert last.end == timeline.makespan == 9 + 6.0


def test_a_bandwidth_needs_bytes():
    with pytest.raises(InputError, match="no parameter_bytes"):
        simulate(lower(GPIPE, data=zero3()), costs(parameter_bytes=None), Network(data_bytes_per_second=1.0))
    with pytest.raises(InputError, match="must be finite and > 0"):
        Network(data_bytes_per_second=0.0)


@given(schedules(), st.sampled_from(AXES), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_simulation_keeps_every_rule_on_random_schedules(schedule, data, seed):
    rng = random.Random(seed)
    stages = schedule.num_stages
    sizes = tuple(float(rng.randrange(4)) for _ in range(stages))
    program = lower(schedule, data=data)
    plain = simulate(lower(schedule), costs(stages, parameter_bytes=sizes))
    timeline = simulate(program, costs(stages, parameter_bytes=sizes), Network(data_bytes_per_second=2.0))
    assert timeline.makespan >= plain.makespan
    assert timeline.ideal_seconds == pytest.approx(plain.ideal_seconds)
    assert Timeline.from_json(timeline.to_json()) == timeline
    for rank, row in enumerate(timeline.background):
        assert all(before.end <= after.start for before, after in pairwise(row))
        gathered: dict[int, list[float]] = {}
        for span in row:
            if span.action.op is Op.UNSHARD:
                gathered.setdefault(span.action.stage, []).append(span.end)
        freed: Counter[int] = Counter()
        for span in timeline.spans[rank]:
            if span.action.op is Op.RESHARD:
                freed[span.action.stage] += 1
            elif span.action.op in (Op.F, Op.B, Op.I) and data.unshards:
                ready = gathered[span.action.stage][freed[span.action.stage]]
                # an overlapped pair starts together
                partner = {b: f for f, b in schedule.overlapped}.get(span.action)
                assert partner is not None or span.start >= ready


def test_a_costs_file_names_the_links_beside_the_ranks():
    stage = {"forward": 1, "backward_input": 1, "backward_weight": 1, "activation_bytes": 6}
    stages = [stage | {"parameter_bytes": 8, "gradient_bytes": 4}] * 2
    text = {"stages": stages, "data_bytes_per_second": 2, "data_latency_seconds": 1, "memory_bytes_per_second": 3}
    file = parse_costs(json.dumps(text))
    assert file.network == Network(data_bytes_per_second=2.0, data_latency_seconds=1.0, memory_bytes_per_second=3.0)
    found = ends_of(simulate(lower(GPIPE, data=zero3()), file.costs, file.network))
    assert found["0UNSHARD"] == (0, 8 / 2 / 2 + 1)
    start, end = found["0REDUCE_GRAD1"]
    assert end - start == 4 / 2 / 2 + 1
    with pytest.raises(InputError, match="data_latency_seconds='x': must be a finite number"):
        parse_costs(json.dumps(text | {"data_latency_seconds": "x"}))


@given(schedules(), st.sampled_from([axis for axis in AXES if axis.unshards or axis.degree > 1]), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_critical_path_leads_through_what_computations_wait_for(schedule, data, seed):
    rng = random.Random(seed)
    stages = schedule.num_stages
    sizes = tuple(float(rng.randrange(8)) for _ in range(stages))
    moved = (1.0,) * stages
    program = lower(schedule, data=data)
    with contextlib.suppress(InputError):
        program = insert_offload(program, rng.randrange(1, 4), beside=rng.randrange(2))
    network = Network(data_bytes_per_second=2.0, memory_bytes_per_second=rng.choice((0.25, 2.0)))
    units = rng.choice((None, tuple(rng.randrange(1, 4) for _ in range(stages))))
    timeline = simulate(program, costs(stages, parameter_bytes=sizes, activation_bytes=moved, units=units), network)
    path = critical_path(timeline)
    assert path[0][1].start == 0
    assert path[-1][1].end == timeline.makespan
    for (_, before), (_, after) in pairwise(path):
        assert before.end == after.start


def test_the_option_offers_every_strategy():
    assert get_args(get_type_hints(ParallelConfig)["data_strategy"]) == tuple(DataStrategy)
