"""The partitioner against an enumeration of all partitions, its formulae, its profiles and the papers' findings."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.partition.networks import read_cluster, resnet50, vgg16

from pipeloom.errors import InputError
from pipeloom.ir import Op, check
from pipeloom.plan.partition import Problem, Profile, data_parallel, parse_profile, partition_layers
from pipeloom.plan.partition.pipedream import stream_period
from pipeloom.plan.partition.stage_search import Pipelines
from pipeloom.schedules import pipedream
from pipeloom.schedules.pipedream import full_in_flight
from pipeloom.schedules.replicated import noam_in_flight
from pipeloom.sim import Costs, simulate

# --- brute force ----------------------------------------------------------------------------------------------------

Stages = tuple[tuple[int, int, int, Any], ...]  # (first, last, components, stages inside of each or None)


def draw(rng: random.Random, num_layers: int, *, whole: bool = False, tied: bool = False) -> Profile:
    """Times, outputs and weights without any shape; small whole numbers make many partitions equal."""

    def number() -> float:
        if whole:
            return float(rng.randint(0, 3))
        return rng.randint(0, 3072) / 1024 if tied else rng.uniform(0.0, 3.0)  # a sum is exact, in any order

    rows = [[f"layer {k}", number(), number(), number(), number()] for k in range(num_layers)]
    ties = []
    for _ in range(2 if tied and num_layers > 1 else 0):
        layers = tuple(sorted(rng.sample(range(num_layers), rng.randint(2, min(3, num_layers)))))
        ties.append((number(), layers))
        for layer in layers:
            rows[layer][4] += ties[-1][0]
    return Profile.of(rows, ties)


def weights_of(profile: Profile, first: int, last: int) -> float:
    """Bytes of weights of layers first..last: each of the layers, less what others of them hold already."""
    again = (size * (sum(first <= k <= last for k in layers) - 1) for size, layers in profile.ties)
    return sum(x.parameter_bytes for x in profile.layers[first : last + 1]) - sum(size for size in again if size > 0)


def pipelines(first: int, last: int, sizes: tuple[int, ...], left: int, most: int) -> Iterator[Stages]:
    """Every pipeline of layers first..last over `left` components of the outermost of the levels `sizes`."""
    for count in range(1, min(left, most) + 1):
        for end in range(first, last + 1) if count < left else [last]:
            if end == last and count < left:
                continue
            inner = [None] if len(sizes) == 1 else list(pipelines(first, end, sizes[:-1], sizes[-2], most))
            rest = [()] if end == last else list(pipelines(end + 1, last, sizes, left - count, most))
            for inside, others in itertools.product(inner, rest):
                yield ((first, end, count, inside), *others)


def seconds_of(profile: Profile, stages: Stages, levels, form: str, hierarchical: bool) -> float:
    """The period, straight from the recurrences of the papers."""
    layers, bandwidth = profile.layers, levels[-1][1]
    worst = 0.0
    for number, (first, last, count, inside) in enumerate(stages):
        part = layers[first : last + 1]
        if inside is None:
            work = sum(layer.forward_seconds + layer.backward_seconds for layer in part)
        else:
            work = seconds_of(profile, inside, levels[:-1], form, hierarchical)
        weights = weights_of(profile, first, last)
        sync = 4 * (count - 1) * weights / (count * bandwidth)
        if form == "published" and hierarchical:
            sync = 2 * (count - 1) * weights / bandwidth
        worst = max(worst, (work + sync if form == "summed" else max(work, sync)) / count)
        if number < len(stages) - 1:
            fewer = min(count, stages[number + 1][2]) if form == "summed" else 1
            worst = max(worst, 2 * layers[last].activation_bytes / bandwidth / fewer)
    return worst


def flatten(stages: Stages, copies: int = 1) -> Iterator[tuple[int, int, int]]:
    for first, last, count, inside in stages:
        if inside is None:
            yield first, last, count * copies
        else:
            yield from flatten(inside, count * copies)


def memory_of(profile: Profile, stages: Stages, state_copies: float) -> float:
    flat = list(flatten(stages))
    held = []
    for number, (first, last, count) in enumerate(flat):
        in_flight = math.ceil(sum(each[2] for each in flat[number:]) / count)
        part = profile.layers[first : last + 1]
        weights, outputs = weights_of(profile, first, last), sum(x.activation_bytes for x in part)
        held.append(in_flight * (weights + outputs) + state_copies * weights)
    return max(held)


def compare(seed: int, levels, num_layers: int, *, form: str, capped: bool, replicate: bool = True) -> None:
    rng = random.Random(seed)
    profile = draw(rng, num_layers, whole=seed % 3 == 0, tied=seed % 2 == 0)
    sizes = tuple(count for count, _ in levels)
    state_copies = rng.choice((0.0, 1.0, 3.0))
    all_of_them = list(pipelines(0, num_layers - 1, sizes, sizes[-1], max(sizes) if replicate else 1))
    held = [memory_of(profile, stages, state_copies) for stages in all_of_them]
    cap = None
    if capped:
        cap = max(1e-3, rng.choice((rng.uniform(0.8 * min(held), max(held)), min(held), sorted(held)[len(held) // 4])))
    hierarchical = len(levels) > 1
    fitting = [stages for stages, size in zip(all_of_them, held, strict=True) if cap is None or size <= cap]
    arguments = {"form": form, "memory_cap": cap, "state_copies": state_copies, "replicate": replicate}
    if not fitting:
        with pytest.raises(InputError, match="memory_cap=") as caught:
            partition_layers(profile, levels, **arguments)
        least = int(str(caught.value).split("needs at least ")[1].split()[0])
        assert least - 1 < min(held) <= least
        return
    times = [seconds_of(profile, stages, levels, form, hierarchical) for stages in fitting]
    found = partition_layers(profile, levels, **arguments)
    assert found.period_seconds == pytest.approx(min(times), rel=1e-12, abs=1e-12), seed
    assert [stage.first for stage in found.stages] == [0, *(stage.last + 1 for stage in found.stages[:-1])]
    assert sum(stage.replicas for stage in found.stages) == math.prod(sizes)
    flat = tuple((stage.first, stage.last, stage.replicas) for stage in found.stages)
    same = [k for k, stages in enumerate(fitting) if tuple(flatten(stages)) == flat]
    assert min(times[k] for k in same) == pytest.approx(found.period_seconds, rel=1e-12, abs=1e-12)
    assert found.memory_bytes == pytest.approx(memory_of(profile, fitting[same[0]], state_copies))
    fewest = min(len(s) for s, t in zip(fitting, times, strict=True) if t <= min(times) * (1 + 1e-12))
    if not hierarchical:
        assert len(found.stages) == fewest, seed


@pytest.mark.parametrize("form", ["published", "summed"])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("group", range(5))
def test_flat_is_equal_to_brute_force(form, capped, group):
    """600 instances."""
    for seed in range(30 * group, 30 * group + 30):
        rng = random.Random(1000 + seed)
        num_layers, ranks = rng.randint(1, 7), rng.randint(1, 6)
        compare(seed, [(ranks, rng.uniform(0.3, 4.0))], num_layers, form=form, capped=capped)


@pytest.mark.parametrize("form", ["published", "summed"])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (2, 2, 2)])
def test_levels_are_equal_to_brute_force(form, capped, sizes):
    """480 instances."""
    for seed in range(20):
        rng = random.Random(2000 + seed)
        levels = [(count, rng.uniform(0.3, 4.0) * (3.0 if k == 0 else 1.0)) for k, count in enumerate(sizes)]
        compare(seed, levels, rng.randint(1, 5 if sum(sizes) < 6 else 4), form=form, capped=capped)


@pytest.mark.parametrize("capped", [False, True])
def test_straight_pipelines_are_equal_to_brute_force(capped):
    for seed in range(20):
        compare(seed, [(3, 1.0)], 3 + seed % 4, form="summed", capped=capped, replicate=False)
        compare(seed, [(2, 2.0), (2, 1.0)], 4 + seed % 2, form="summed", capped=capped, replicate=False)


@pytest.mark.parametrize(("weight", "inner"), [(0.0, 1), (1.0, 1), (1e7, 2)])
def test_of_equal_partitions_the_one_with_fewest_stages_inside_of_components_too(weight, inner):
    """The first node decides; the second has room for both its layers as one stage, unless synchronising is slow."""
    light = [("light", 0.5, 0.5, 0.0, weight), ("lighter", 0.25, 0.5, 0.0, weight)]
    profile = Profile.of([("heavy", 4.0, 4.0, 0.0, 1e3), *light])
    found = partition_layers(profile, [(2, 1e6), (2, 1.0)])
    assert [stage.replicas for stage in found.stages] == ([2, 2] if inner == 1 else [2, 1, 1])
    assert found.period_seconds == (8.0 + 2e3 / 1e6) / 2


def test_only_what_fits_is_chosen_and_equal_layers_make_few_stages():
    profile = Profile.of((f"layer {k}", 0.1, 0.2, 0.0, 0.0) for k in range(12))
    [stage] = partition_layers(profile, [(6, 1.0)]).stages
    assert (stage.first, stage.last, stage.replicas) == (0, 11, 6)
    shared = Profile.of((f"layer {k}", 0.1, 0.2, 0.0, 1.0) for k in range(12))
    assert [stage.replicas for stage in partition_layers(shared, [(6, 1.0)]).stages] == [1] * 6


@pytest.mark.parametrize("form", ["published", "summed"])
def test_levels_of_one_component_change_nothing(form):
    one = (1, 0.1)
    for seed in range(5):
        profile = draw(random.Random(seed), 6)
        for levels in ([(4, 1.0)], [(2, 3.0), (2, 1.0)]):
            alone = partition_layers(profile, levels, form=form)
            for more in ([one, *levels], [*levels, one], [levels[0], one, *levels[1:]]):
                assert partition_layers(profile, more, form=form) == alone
                assert data_parallel(profile, more, form=form) == data_parallel(profile, levels, form=form)


def test_what_would_take_hours_is_refused_with_a_cap_earlier():
    """A cap needs the tables inside of a component once for each number of ranks behind it."""
    profile, levels = draw(random.Random(0), 20), [(1000, 10.0), (1000, 1.0)]
    Pipelines(Problem(profile, levels))
    with pytest.raises(InputError, match="20 layers on 1000000 ranks: finding their partition would take hours"):
        Pipelines(Problem(profile, levels, memory_cap=1.0))
    with pytest.raises(InputError, match="would take hours"):
        Pipelines(Problem(profile, [(100_000, 1.0)]))


def test_fewer_ranks_are_named_where_they_are_faster():
    profile = draw(random.Random(1), 3)
    found = partition_layers(profile, [(8, 0.01)])
    ranks, seconds = found.fewer_ranks
    periods = [partition_layers(profile, [(count, 0.01)]).period_seconds for count in range(1, 9)]
    assert seconds == min(periods) == periods[ranks - 1] < found.period_seconds == periods[-1]
    assert partition_layers(profile, [(8, 1e9)]).fewer_ranks is None


def test_in_flight_is_what_the_schedule_of_replicas_admits():
    found = partition_layers(draw(random.Random(10), 9), [(7, 0.5)])
    replicas = [stage.replicas for stage in found.stages]
    assert replicas == [2, 1, 3, 1]
    sizes = {"num_ranks": sum(replicas), "num_microbatches": 4 * math.lcm(*replicas)}
    admitted = [stage.in_flight for stage in found.stages for _ in range(stage.replicas)]
    assert list(check(pipedream(**sizes, replicas=replicas)).live_activations) == admitted


@pytest.mark.parametrize("seed", range(50))
def test_full_in_flight_is_never_less_and_the_same_without_replicas(seed):
    replicas = random.Random(seed).choices(range(1, 6), k=1 + seed % 5)
    full = full_in_flight(replicas)
    held = [count * ranks for count, ranks in zip(full, replicas, strict=True)]
    for stage, (count, ranks, behind) in enumerate(zip(full, replicas, [*held[1:], 0], strict=True)):
        assert count >= math.ceil(sum(replicas[stage:]) / ranks)
        assert (count - 1) * ranks < ranks + behind <= count * ranks
    assert full_in_flight([1] * len(replicas)) == list(range(len(replicas), 0, -1))
    assert full_in_flight([1, 3, 1]) == [7, 2, 1]


@pytest.mark.parametrize("seed", range(40))
def test_the_period_with_noam_in_flight_is_that_of_a_long_stream(seed):
    """Between two backwards that are a whole number of rounds of the longest cycle apart, behind the start."""
    rng = random.Random(seed)
    replicas = [rng.randint(1, 4) for _ in range(1 + seed % 5)]
    forward, backward = ([rng.uniform(0.1, most) * r for r in replicas] for most in (3, 6))
    busy, noam = [f + b for f, b in zip(forward, backward, strict=True)], noam_in_flight(replicas)
    period = stream_period(busy, replicas=replicas, in_flight=noam)
    assert period >= max(b / r for b, r in zip(busy, replicas, strict=True))
    around = [
        (sum(busy[s : t + 1]), noam[s] * replicas[s] - (noam[t] - 1) * replicas[t])
        for s in range(len(busy))
        for t in range(s, len(busy))
    ]
    [length] = {count for seconds, count in around if seconds / count == pytest.approx(period, rel=1e-12)}
    each = math.lcm(*replicas, length)
    stream = 4 * each + max(1, 500 // each) * each
    schedule = pipedream(num_ranks=sum(replicas), num_microbatches=stream, replicas=replicas)
    rows = simulate(schedule, Costs.per_stage(forward=forward, backward=backward)).compute_spans
    ends = {span.action.microbatch: span.end for row in rows for span in row if span.action[:2] == (0, Op.B)}
    last = stream - 1 - noam[0] * replicas[0]
    assert (ends[last] - ends[last - each]) / each == pytest.approx(period, rel=1e-9)


def test_no_stage_waits_with_full_in_flight_nor_with_noam_of_one_rank_a_stage():
    for seed in range(200):
        rng = random.Random(seed)
        replicas = [rng.randint(1, 5) for _ in range(1 + seed % 6)]
        busy = [rng.uniform(0.1, 9) * r for r in replicas]
        slowest = max(b / r for b, r in zip(busy, replicas, strict=True))
        full = stream_period(busy, replicas=replicas, in_flight=full_in_flight(replicas))
        straight = stream_period(busy, replicas=[1] * len(busy), in_flight=noam_in_flight([1] * len(busy)))
        assert (full, straight) == (pytest.approx(slowest, rel=1e-12), pytest.approx(max(busy), rel=1e-12))


@pytest.mark.parametrize("tied", [False, True])
def test_profiles_are_read_back_exactly(tied):
    profile = draw(random.Random(0), 5, tied=tied)
    assert len(profile.ties) == 2 * tied
    assert parse_profile(profile.to_json()) == profile


# --- the papers' findings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["a", "b"])
def test_vgg_16_gets_a_data_parallel_front_and_a_single_tail_and_resnet_50_data_parallelism(cluster):
    cluster = read_cluster(cluster)
    bandwidth = cluster.between_nodes.bytes_per_second
    vgg, resnet = vgg16(cluster, 64), resnet50(cluster, 128)
    assert sum(layer.parameter_bytes for layer in vgg.layers) == 4 * 138_357_544
    assert sum(layer.parameter_bytes for layer in resnet.layers) == 4 * 25_557_032
    front, tail = partition_layers(vgg, [(16, bandwidth)], form="published").stages
    assert (front.replicas, tail.replicas) == (15, 1)
    assert vgg.layers[tail.last - 2].name == "fc6"
    assert tail.first <= tail.last - 2
    flat = [(16, bandwidth)]
    [only] = partition_layers(resnet, flat, form="published").stages
    assert only.replicas == 16
    found, together = partition_layers(resnet, flat), data_parallel(resnet, flat)
    assert sum(stage.replicas for stage in found.stages[1:]) > 1  # several replicas receive the first stage's output
    assert 0.95 < found.period_seconds / together.period_seconds < 0.96
