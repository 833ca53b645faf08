"""The slicer against brute force, its bounds, its fits and its timelines."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.common.equal_work import equal_work
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.plan.slicing import (
    LinearTime,
    Sample,
    SliceCosts,
    fit,
    parse_slice_costs,
    peak_tokens,
    scheduled_timeline,
    slice_batch,
    slice_for_schedule,
    slicing_timeline,
    uniform,
)
from pipeloom.plan.slicing.scheduled_slices import peak_along

# --- brute force ----------------------------------------------------------------------------------------------------


def cuts(sequence: int, grid: int) -> Iterator[tuple[int, ...]]:
    """Every way to slice a sequence at multiples of the grid."""
    inner = range(grid, sequence, grid)
    for count in range(len(inner) + 1):
        for ends in itertools.combinations(inner, count):
            yield tuple(b - a for a, b in itertools.pairwise((0, *ends, sequence)))


def pieces(batch: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a batch as a sum of pieces, largest first."""
    if batch == 0:
        yield ()
    for size in range(min(batch, most), 0, -1):
        for rest in pieces(batch - size, size):
            yield (size, *rest)


def objective(ranks, slices, batch) -> float:
    """What a slicing takes by the paper's formula, from nothing but the costs of each rank."""
    units = [
        (size, length, sum(lengths[:index]))
        for size, lengths in zip(batch, slices, strict=True)
        for index, length in enumerate(lengths)
    ]
    times = [[rank(*unit) for unit in units] for rank in ranks]
    total = 0.0
    for phase in (0, 1):
        slowest = [max(row[u][phase] for row in times) for u in range(len(units))]
        total += sum(slowest) + (len(ranks) - 1) * max(slowest)
    return total


def brute_force(rank, num_ranks, sequence, batch, grid, memory_limit=None, most=None) -> float:
    best = math.inf
    ways = list(cuts(sequence, grid))
    for sizes in pieces(batch, most or batch):
        for slices in itertools.product(ways, repeat=len(sizes)):
            if memory_limit is not None and peak_tokens(slices, sizes, num_ranks) > memory_limit:
                continue
            best = min(best, objective([rank] * num_ranks, slices, sizes))
    return best


def arbitrary(rng: random.Random):
    """A cost without any shape: not monotone, and forward and backward unlike each other."""
    drawn: dict[tuple[int, int, int], tuple[float, float]] = {}

    def cost(batch, length, context):
        return drawn.setdefault((batch, length, context), (rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0)))

    return cost


def linear(rng: random.Random) -> SliceCosts:
    """The paper's form: flat, then rising; sometimes without context or messages."""

    def time(scale):
        flat = rng.uniform(0.2, 2.0)
        base = ((1.0, flat), (4.0, flat), (16.0, flat * rng.uniform(1.0, 6.0)))
        context = tuple(rng.choice((0.0, 1.0)) * rng.uniform(0.0, 0.05) for _ in range(4))
        return LinearTime(base=tuple((n, scale * t) for n, t in base), context=context)

    return SliceCosts(
        forward=time(1.0),
        backward=time(2.0),
        latency=rng.choice((0.0, 0.1)),
        seconds_per_token_sent=rng.choice((0.0, 0.01)),
    )


@pytest.mark.parametrize("group", [0, *(pytest.param(g, marks=pytest.mark.whole_grid) for g in range(1, 10))])
def test_equal_to_brute_force(group):
    """500 instances (50 in every run): any grid, batch, memory limit; costs of the paper's form and of none."""
    for seed in range(50 * group, 50 * group + 50):
        rng = random.Random(seed)
        batch = rng.choice((1, 1, 1, 2, 3))
        grid = rng.randint(1, 4)
        sequence = rng.randint(grid, {1: 8, 2: 4, 3: 3}[batch] * grid)  # divisible by the grid, or not
        num_ranks = rng.randint(2, 9)  # one alone has a test of its own
        cost = rng.choice((arbitrary, linear))(rng)
        limit = None
        if rng.random() < 0.4:
            least = min(batch * sequence, sequence + (num_ranks - 1) * grid)
            limit = rng.randint(least, max(least, 2 * batch * sequence))
        found = slice_batch(
            cost, sequence=sequence, num_ranks=num_ranks, batch=batch, grid=grid, epsilon=0.0, memory_limit=limit
        )
        expected = brute_force(cost, num_ranks, sequence, batch, grid, limit)
        assert found.predicted_seconds == pytest.approx(expected, rel=1e-9), seed
        assert found.gap_seconds == 0
        # What it says is what its slices give.
        assert objective([cost] * num_ranks, found.slices, found.batch) == pytest.approx(expected, rel=1e-9), seed
        assert sum(found.batch) == batch
        assert all(sum(lengths) == sequence and min(lengths) > 0 for lengths in found.slices)
        assert all(sum(lengths[:k]) % grid == 0 for lengths in found.slices for k in range(len(lengths)))
        assert found.peak_tokens == peak_tokens(found.slices, found.batch, num_ranks)
        assert limit is None or found.peak_tokens <= limit


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_differ(seed):
    """Ranks that are multiples of each other have one more exact bound; any have a bound that the flow keeps."""
    rng = random.Random(seed)
    sequence, num_ranks, batch = rng.randint(4, 7), rng.randint(2, 5), rng.choice((1, 2))
    one = arbitrary(rng)
    factors = [rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in range(num_ranks)]
    factors[rng.randrange(num_ranks)] = 2.0
    alike = [lambda b, n, c, f=f: tuple(f * t for t in one(b, n, c)) for f in factors]
    found = slice_batch(alike, sequence=sequence, num_ranks=num_ranks, batch=batch, grid=1, epsilon=0.0)

    def bound(slices, sizes):
        units = [(b, n, sum(ns[:i])) for b, ns in zip(sizes, slices, strict=True) for i, n in enumerate(ns)]
        ends = [[2.0 * one(*unit)[phase] for unit in units] for phase in (0, 1)]
        return sum(sum(row) + (sum(factors) / 2.0 - 1) * max(row) for row in ends)

    best = min(
        bound(slices, sizes)
        for sizes in pieces(batch, batch)
        for slices in itertools.product(cuts(sequence, 1), repeat=len(sizes))
    )
    assert found.predicted_seconds == pytest.approx(best, rel=1e-9)
    different = [arbitrary(rng) for _ in range(num_ranks)]
    found = slice_batch(different, sequence=sequence, num_ranks=num_ranks, batch=batch, grid=1, epsilon=0.0)
    seconds = slicing_timeline(different, found.slices, num_ranks=num_ranks, batch=found.batch).makespan
    assert seconds <= found.predicted_seconds * (1 + 1e-9)


# --- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), epsilon=st.floats(0.0, 2.0), num_ranks=st.integers(2, 12))
def test_epsilon_costs_no_more_than_its_bound(seed, epsilon, num_ranks):
    cost = arbitrary(random.Random(seed))
    sizes = {"sequence": 9, "num_ranks": num_ranks, "grid": 1}
    exact = slice_batch(cost, **sizes, epsilon=0.0)
    coarse = slice_batch(cost, **sizes, epsilon=epsilon)
    assert coarse.gap_seconds == pytest.approx(2 * (num_ranks - 1) * epsilon)
    assert exact.predicted_seconds <= coarse.predicted_seconds * (1 + 1e-12)
    assert coarse.predicted_seconds <= exact.predicted_seconds + coarse.gap_seconds + 1e-9
    usual = slice_batch(cost, **sizes)
    assert usual.predicted_seconds <= exact.predicted_seconds + usual.gap_seconds + 1e-9
    assert usual.gap_seconds == pytest.approx(1e-3 * usual.predicted_seconds)


def test_one_rank_sends_nothing_and_slices_only_where_that_is_cheaper():
    flat = LinearTime(base=((1.0, 1.0), (64.0, 1.0)))
    costs = SliceCosts(forward=flat, backward=flat, latency=5.0, seconds_per_token_sent=1.0)
    found = slice_batch(costs, sequence=64, num_ranks=1, batch=2, grid=8, max_piece=1)
    assert (found.slices, found.batch) == (((64,), (64,)), (1, 1))
    assert found.predicted_seconds == 4.0
    assert found.max_slice_seconds == 2.0
    falling = slice_batch(lambda b, n, c: (float(n * n), 0.0), sequence=64, num_ranks=1, grid=8)
    assert falling.slices == ((8,) * 8,)


def test_the_batch_alone_can_be_cut():
    rng = random.Random(5)
    cost = arbitrary(rng)
    found = slice_batch(cost, sequence=12, num_ranks=3, batch=4, grid=2, sliced=False, epsilon=0.0)
    best = min(objective([cost] * 3, [(12,)] * len(sizes), sizes) for sizes in pieces(4, 4))
    assert found.predicted_seconds == pytest.approx(best)
    assert set(found.slices) == {(12,)}


def test_many_cells_make_no_worse_answer_than_even_ones():
    """2,048 tokens on a grid of 8: at least as good as every even slicing, and what it says is exact."""
    base = tuple((float(n), 1e-3 * max(n, 256) / 256) for n in (8, 256, 2048))
    forward = LinearTime(base=base, context=(0.0, 0.0, 1e-8, 1e-9))
    backward = LinearTime(base=tuple((n, 2 * t) for n, t in base), context=(0.0, 0.0, 2e-8, 2e-9))
    costs = SliceCosts(forward=forward, backward=backward, latency=1e-4)
    found = slice_batch(costs, sequence=2048, num_ranks=16)
    assert slicing_timeline(costs, found.slices, num_ranks=16).makespan == pytest.approx(found.predicted_seconds)
    for count in (1, 2, 4, 8, 16, 32):
        for other in (
            uniform(sequence=2048, num_slices=count, multiple=8),
            equal_work(sequence=2048, num_slices=count, width=512, multiple=8),
        ):
            assert (
                found.predicted_seconds <= slicing_timeline(costs, [other], num_ranks=16).makespan + found.gap_seconds
            )
    lengths = found.slices[0]
    assert lengths[0] > lengths[-1]  # what has more before it is shorter


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sequence": 0}, "sequence=0: must be at least 1"),
        ({"num_ranks": 0}, "ranks=0: must be at least 1"),
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"grid": 0}, "grid=0: must be at least 1"),
        ({"grid": 65}, "grid=65: must be at most the sequence, 64 tokens"),
        ({"sequence": 10**6, "grid": 1}, "Use 489 or more"),
        ({"memory_limit": 5, "batch": 9}, "Raise memory_limit to 112"),
        ({"memory_limit": -1, "batch": 1}, "Raise memory_limit to 64"),
    ],
)
def test_refused_sizes(sizes, message):
    defaults = {"sequence": 64, "num_ranks": 4, "grid": 16}
    with pytest.raises(InputError, match=message) as error:
        slice_batch(lambda b, n, c: (float(n), 1.0), **{**defaults, **sizes})
    assert "\n" not in str(error.value)
    if "allow" in message:  # the limit that it names is enough, and one less is not
        least = int(message.split()[1])
        slice_batch(lambda b, n, c: (float(n), 1.0), **{**defaults, **sizes, "memory_limit": least})
        with pytest.raises(InputError):
            slice_batch(lambda b, n, c: (float(n), 1.0), **{**defaults, **sizes, "memory_limit": least - 1})


def test_refused_costs():
    with pytest.raises(InputError, match=r"length=4, context=4\): the backward takes -1 s: must be at least 0"):
        slice_batch(lambda b, n, c: (1.0, -1.0 if c == 4 else 1.0), sequence=8, num_ranks=2, grid=4)
    with pytest.raises(InputError, match="takes nan"):
        slice_batch(lambda b, n, c: (math.nan, 1.0), sequence=8, num_ranks=2, grid=4)
    with pytest.raises(InputError, match="costs has 2 entries for 3 ranks"):
        slice_batch([lambda b, n, c: (1.0, 1.0)] * 2, sequence=8, num_ranks=3, grid=4)
    with pytest.raises(InputError, match="slices"):
        slicing_timeline(lambda b, n, c: (1.0, 1.0), [(4, 0)], num_ranks=2)


# --- costs ----------------------------------------------------------------------------------------------------------


def test_the_linear_form():
    time = LinearTime(base=((8.0, 1.0), (16.0, 3.0)), context=(0.5, 0.25, 0.125, 2.0))
    assert float(time(1, 4, 0)) == 1.0  # not below what was measured
    assert float(time(1, 12, 0)) == 2.0
    assert float(time(1, 24, 0)) == 5.0
    assert float(time(3, 8, 0)) == 5.0
    assert float(time(2, 4, 8)) == 1.0 + 0.5 + 2 * (0.25 * 4 + 0.125 * 8 + 2.0 * 32)
    assert float(LinearTime(base=((8.0, 1.0),))(1, 16, 0)) == 2.0
    costs = SliceCosts(forward=time, backward=time, latency=10.0, seconds_per_token_sent=1.0)
    assert tuple(map(float, costs(2, 4, 8))) == (float(time(2, 4, 8)) + 18.0,) * 2


def test_a_fit_recovers_the_form_and_says_how_far_off_it_is():
    true = LinearTime(base=((8.0, 1e-3), (512.0, 4e-3), (1024.0, 9e-3)), context=(1e-5, 2e-8, 3e-8, 4e-10))
    points = [(n, 0) for n in (8, 512, 1024)] + [(n, c) for n in (8, 64, 512) for c in (8, 256, 512)]
    exact = [Sample(n, c, float(true(1, n, c))) for n, c in points]
    fitted, error = fit(exact)
    assert error < 1e-9
    assert fitted.base == true.base
    assert fitted.context == pytest.approx(true.context, rel=1e-5)
    rng = random.Random(0)
    noisy = [s if s.context == 0 else s._replace(seconds=s.seconds * rng.uniform(0.9, 1.1)) for s in exact]
    fitted, error = fit(noisy)
    off = [float(fitted(1, n, c)) / t - 1 for n, c, t in noisy if c]
    assert error == pytest.approx(math.sqrt(sum(e * e for e in off) / len(off)))
    assert 0.005 < error < 0.1
    falling = [Sample(8, 0, 1.0), *(Sample(8, c, 1.0 - c / 16) for c in (1, 2, 4))]
    assert fit(falling)[0] == LinearTime(base=((8.0, 1.0),))
    # 4 and 1: nearest to both, by relative error, is 20 / 17.
    fitted, error = fit([Sample(8, 0, 4.0), Sample(16, 0, 1.0), Sample(32, 0, 5.0)])
    assert [seconds for _, seconds in fitted.base] == pytest.approx([20 / 17, 20 / 17, 5.0])
    assert error == pytest.approx(math.sqrt(((12 / 17) ** 2 + (3 / 17) ** 2) / 2))
    # Sixty lengths that take 1 and 2 seconds in turn: all pairs of 2 and 1 are levelled to 6 / 5.
    fitted, _ = fit([Sample(8 * (n + 1), 0, 1.0 + n % 2) for n in range(60)])
    assert [seconds for _, seconds in fitted.base] == pytest.approx([1.0, *[1.2] * 58, 2.0])
    with pytest.raises(InputError, match="without context"):
        fit([Sample(8, 8, 1.0)])
    with pytest.raises(InputError, match="Measure it again"):
        fit([Sample(8, 0, 0.0)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_noise_makes_a_cost_negative_or_falling(data):
    """Measurements without any sense; slices of any batch, also of more tokens than were measured."""
    lengths = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True))
    times = st.floats(1e-9, 10.0) | st.sampled_from([1e-6, 1.0])
    samples = [Sample(length, 0, data.draw(times)) for length in lengths]
    samples += [Sample(*data.draw(st.tuples(st.integers(1, 64), st.integers(1, 64), times))) for _ in range(6)]
    time, error = fit(samples)
    assert math.isfinite(error)
    tokens = np.arange(1, 200)
    for batch in (1, 4):
        for context in (0, 1, 63, 500):
            seconds = time(batch, tokens, context)
            assert seconds.min() >= 0
            assert np.diff(seconds).min() >= -1e-12 * seconds.max()
            assert (time(batch, tokens, context + 1) - seconds).min() >= -1e-12 * seconds.max()
    costs = SliceCosts(forward=time, backward=time)
    assert slice_batch(costs, sequence=96, num_ranks=3, batch=3, grid=8).predicted_seconds >= 0


GOOD = {
    "forward": {"base": [[8, 0.001], [64, 0.004]], "context": [0, 0, 1e-6, 1e-8]},
    "backward": {"base": [[8, 0.002]], "context": [0, 0, 2e-6, 2e-8]},
    "latency": 1e-4,
    "seconds_per_token_sent": 1e-7,
}


def test_a_costs_file_round_trips():
    costs = parse_slice_costs(json.dumps(GOOD))
    assert costs.forward == LinearTime(base=((8.0, 0.001), (64.0, 0.004)), context=(0.0, 0.0, 1e-6, 1e-8))
    assert parse_slice_costs(costs.to_json()) == costs
    short = parse_slice_costs(json.dumps({"forward": {"base": [[1, 1]]}, "backward": {"base": [[1, 1]]}}))
    assert short == SliceCosts(forward=LinearTime(base=((1.0, 1.0),)), backward=LinearTime(base=((1.0, 1.0),)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"forward": None}, "forward"),
        ({"forward": {"context": [0, 0, 0, 0]}}, "'base'"),
        ({"forward": {"base": []}}, "the slice costs file: forward: base has tokens []"),
        ({"forward": {"base": [[1, 2, 3]]}}, "forward.base[0]=[1, 2, 3]: must be a list of length 2"),
        (
            {"backward": {"base": [[8, 1], [8, 2]]}},
            "the slice costs file: backward: base has tokens [8.0, 8.0]",
        ),
        ({"backward": {"base": [[0, 1]]}}, "backward.base[0][0]=0"),
        ({"backward": {"base": [[8, -1]]}}, "backward.base[0][1]=-1"),
        ({"backward": {"base": [["8", 1]]}}, "backward.base[0][0]='8'"),
        ({"forward": {"base": [[8, 1]], "context": [1, 2]}}, "forward.context=[1, 2]: must be a list of length 4"),
        ({"forward": {"base": [[8, 1]], "context": [1, 2, 3, float("inf")]}}, "forward.context[3]=inf"),
        ({"forward": {"base": [[8, 1]], "contxt": [1, 2, 3, 4]}}, "contxt"),
        ({"latency": -1}, "latency"),
        ({"latency": True}, "latency"),
        ({"seconds_per_token_sent": float("nan")}, "seconds_per_token_sent"),
        ({"speed": 1}, "speed"),
    ],
)
def test_bad_costs_files_are_refused_by_key(change, named):
    with pytest.raises(InputError) as error:
        parse_slice_costs(json.dumps({**GOOD, **change}))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"forward": {"base": [[8, 1]]}}', "[" * 100_000, '{"a": 1, "a": 1}'])
def test_what_is_no_costs_file_is_refused(text):
    with pytest.raises(InputError, match="slice costs file"):
        parse_slice_costs(text)


# --- even slicings and timelines ------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_even_slicings(data):
    multiple = data.draw(st.integers(1, 16))
    sequence = data.draw(st.integers(1, 700))
    count = data.draw(st.integers(1, min(20, -(-sequence // multiple))))
    equal = uniform(sequence=sequence, num_slices=count, multiple=multiple)
    lighter = equal_work(sequence=sequence, num_slices=count, width=data.draw(st.integers(1, 256)), multiple=multiple)
    for lengths in (equal, lighter):
        assert len(lengths) == count
        assert sum(lengths) == sequence
        assert min(lengths) > 0
        assert all(length % multiple == 0 for length in lengths[:-1])
    whole = equal[:-1] if sequence % multiple else equal
    assert not whole or max(whole) - min(whole) <= multiple
    with pytest.raises(InputError, match="slices"):
        uniform(sequence=sequence, num_slices=-(-sequence // multiple) + 1, multiple=multiple)


def test_slices_of_equal_work_have_equal_arithmetic():
    width, sequence = 64, 65536
    lengths = equal_work(sequence=sequence, num_slices=7, width=width)

    def operations(end):  # of the first tokens in one block: matrices, then scores and values
        return 24 * width**2 * end + sum((2 * 2 * width) * position for position in (end * (end - 1) / 2,))

    ends = list(itertools.accumulate(lengths, initial=0))
    parts = [operations(b) - operations(a) for a, b in itertools.pairwise(ends)]
    assert max(parts) / min(parts) < 1.001
    assert lengths[0] > 3 * lengths[-1]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 5))
def test_timelines_take_what_the_formula_says(seed, num_ranks):
    rng = random.Random(seed)
    cost = arbitrary(rng)
    slices = [uniform(sequence=12, num_slices=rng.randint(1, 5)) for _ in range(rng.randint(1, 3))]
    batch = [rng.randint(1, 3) for _ in slices]
    timeline = slicing_timeline(cost, slices, num_ranks=num_ranks, batch=batch)
    assert timeline.makespan == pytest.approx(objective([cost] * num_ranks, slices, batch))
    ended = {span.action: span.end for row in timeline.spans for span in row}
    for rank, row in enumerate(timeline.spans):
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(row))
        for span in row:
            stage, op, *unit = span.action
            neighbour = type(span.action)(stage - 1 if op == "F" else stage + 1, op, *unit)
            assert stage == rank
            assert span.start >= ended.get(neighbour, 0.0) - 1e-12


# --- in a schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_slices_for_a_schedule_beat_all_that_are_alike(seed):
    """Simulated with those slices, the schedule takes what is said, and no even slicing takes less."""
    rng = random.Random(seed)
    costs, sizes = (
        linear(rng),
        {"sequence": 96, "num_ranks": rng.randint(2, 5), "batch": rng.choice((1, 2, 4)), "grid": 4},
    )
    for schedule in ("seq1f1b", "terapipe"):
        found = slice_for_schedule(costs, schedule=schedule, **sizes)
        timeline = scheduled_timeline(costs, found, schedule=schedule, name="found")
        assert timeline.makespan == pytest.approx(found.predicted_seconds)
        assert timeline.name == "found"
        works = sum(map(sum, zip(*(costs(b, n, c) for b, n, c in units(found)), strict=True)))
        assert found.predicted_seconds >= works * (1 - 1e-12)
        for count in (1, 2, 4, 8):
            lengths = uniform(sequence=96, num_slices=count, multiple=4)
            even = replace(found, slices=(lengths,) * sizes["batch"], batch=(1,) * sizes["batch"])
            other = scheduled_timeline(costs, even, schedule=schedule, name="even")
            assert found.predicted_seconds <= other.makespan * (1 + 1e-9)
        if schedule == "terapipe":
            exact = slice_batch(costs, **sizes)
            assert found.predicted_seconds >= exact.predicted_seconds - exact.gap_seconds
            again = slicing_timeline(costs, found.slices, num_ranks=sizes["num_ranks"], batch=found.batch).makespan
            assert found.predicted_seconds == pytest.approx(again)


def units(found):
    """(sequences, tokens, context) of every slice."""
    for size, lengths in zip(found.batch, found.slices, strict=True):
        for index, length in enumerate(lengths):
            yield size, length, sum(lengths[:index])


def test_slices_for_a_schedule_fit_into_memory():
    costs = linear(random.Random(3))
    sizes = {"sequence": 64, "num_ranks": 4, "batch": 4, "grid": 4}
    free = slice_for_schedule(costs, schedule="seq1f1b", **sizes)
    built = schedules.build("seq1f1b", num_ranks=4, num_microbatches=len(free.batch), num_slices=len(free.slices[0]))
    assert free.peak_tokens == free.batch[0] * peak_along(built, free.slices[0])
    tight = slice_for_schedule(costs, schedule="seq1f1b", **sizes, memory_limit=90)
    assert tight.peak_tokens <= 90
    assert tight.predicted_seconds >= free.predicted_seconds
    with pytest.raises(InputError, match=r"Raise memory_limit to 7[0-9]"):
        slice_for_schedule(costs, schedule="seq1f1b", **sizes, memory_limit=10)
    with pytest.raises(InputError, match="Raise memory_limit to 256"):
        slice_for_schedule(costs, schedule="terapipe", **sizes, memory_limit=255)
    assert slice_for_schedule(costs, schedule="seq1f1b", **sizes, sliced=False).slices[0] == (64,)
    with pytest.raises(InputError, match="needs the same number of sequences and the same slice lengths"):
        scheduled_timeline(costs, replace(free, slices=((64,), (32, 32)), batch=(2, 2)), schedule="seq1f1b", name="")


def test_slices_for_a_schedule_use_the_memory_that_there_is():
    """Rank 0 of two holds a sequence and the first slice of the next: of 121 tokens, 64 and 56."""

    def costs(batch, length, context):
        forward = 20 + batch * length * (1 + context / 10)
        return forward, 2 * forward

    sizes = {"sequence": 64, "num_ranks": 2, "batch": 2, "grid": 2}
    found = slice_for_schedule(costs, schedule="seq1f1b", **sizes, memory_limit=121)
    assert (found.slices[0], found.peak_tokens) == ((56, 8), 120)


class WholeNumbers:
    takes_arrays = True

    def __call__(self, batch, length, context):
        return batch * length + context, 2 * batch * length


@pytest.mark.parametrize("costs", [lambda b, n, ctx: (b * n + ctx, 2 * b * n), WholeNumbers()])
def test_costs_may_be_whole_numbers(costs):
    sizes = {"sequence": 16, "num_ranks": 2, "batch": 2, "grid": 4}
    assert slice_batch(costs, **sizes) == slice_batch(lambda *unit: tuple(map(float, costs(*unit))), **sizes)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (lambda *_: 1.0, "costs=1.0: must return two numbers"),
        (lambda *_: None, "costs=None: must return two numbers"),
        (lambda *_: (1, 2, 3), "must return two numbers"),
        (lambda *_: (10**5000, 1), "too large: must return two numbers"),
        (5, "costs=5: must be a function"),
        ([5, 6], "costs=5: must be a function"),
    ],
)
def test_costs_that_are_no_pairs_are_refused(costs, said):
    with pytest.raises(InputError, match=said):
        slice_batch(costs, sequence=16, num_ranks=2, grid=4)
