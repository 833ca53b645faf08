"""Partitions of graphs of layers against all assignments of layers to stages; PipeDream's text format."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence

import pytest

from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.plan.partition import (
    Profile,
    parse_graph,
    parse_profile,
    partition_layers,
    partition_synchronous,
    pivot_seconds,
)
from pipeloom.plan.partition.cuts import MOST_CUTS, Cuts

Stages = list[tuple[tuple[int, ...], int]]  # layers and replicas


def draw(rng: random.Random, num_layers: int) -> Profile:
    """Layers with random edges, some without inputs or without cost, and weights that two of them share."""
    rows = [[f"layer {k}", *(rng.uniform(0.0, 3.0) for _ in range(4))] for k in range(num_layers)]
    if rng.random() < 0.5:
        rows[0][1:] = rows[rng.randrange(num_layers)][1:] = [0.0] * 4
    edges = [pair for pair in itertools.combinations(range(num_layers), 2) if rng.random() < 0.4]
    ties = []
    if num_layers > 1 and rng.random() < 0.5:
        pair = tuple(sorted(rng.sample(range(num_layers), 2)))
        ties = [(1.0, pair)]
        for layer in pair:
            rows[layer][4] += 1.0
    return Profile.of(rows, ties, edges=edges)


def every_partition(profile: Profile, layers: Sequence[int], ranks: int) -> Iterator[Stages]:
    """All assignments of layers to stages such that no edge leads back, with all numbers of replicas.

    No stage has only layers without inputs and costs, which change nothing where they are.
    """
    free = set[int]()
    for number, layer in enumerate(profile.layers):
        if not any(dataclasses.astuple(layer)[1:]) and all(a in free for a, b in profile.edges or () if b == number):
            free.add(number)
    for count in range(1, min(len(layers), ranks) + 1):
        for stages in itertools.product(range(count), repeat=len(layers)):
            of = dict(zip(layers, stages, strict=True))
            if len(set(stages)) < count or any(of.get(a, 0) > of.get(b, count) for a, b in profile.edges or ()):
                continue
            parts = [tuple(layer for layer in layers if of[layer] == stage) for stage in range(count)]
            if len(free) < len(profile.layers) and any(free >= set(part) for part in parts):
                continue
            for shares in itertools.combinations(range(1, ranks), count - 1):
                used = (0, *shares, ranks)
                yield [(part, used[k + 1] - used[k]) for k, part in enumerate(parts)]


def weights_of(profile: Profile, layers: Sequence[int]) -> float:
    again = sum(size for size, pair in profile.ties if set(pair) <= set(layers))
    return sum(profile.layers[layer].parameter_bytes for layer in layers) - again


def crossing(profile: Profile, front: set[int]) -> float:
    sources = {a for a, b in profile.edges or () if a in front and b not in front}
    return sum(profile.layers[layer].activation_bytes for layer in sources)


def kept_of(profile: Profile, layers: Sequence[int]) -> float:
    return sum(profile.layers[layer].activation_bytes for layer in layers)


def period_of(profile: Profile, stages: Stages, bandwidth: float) -> float:
    worst, front = 0.0, set[int]()
    for number, (layers, count) in enumerate(stages):
        work = sum(profile.layers[k].forward_seconds + profile.layers[k].backward_seconds for k in layers)
        sync = 4 * (count - 1) * weights_of(profile, layers) / (count * bandwidth)
        worst, front = max(worst, (work + sync) / count), front | set(layers)
        if number < len(stages) - 1:
            worst = max(worst, 2 * crossing(profile, front) / bandwidth / min(count, stages[number + 1][1]))
    return worst


def memory_of(profile: Profile, stages: Stages) -> float:
    held = []
    for number, (layers, count) in enumerate(stages):
        in_flight = math.ceil(sum(ranks for _, ranks in stages[number:]) / count)
        held.append(in_flight * (weights_of(profile, layers) + kept_of(profile, layers)))
    return max(held)


def step_of(profile: Profile, stages: Stages, bandwidth: float, num_microbatches: int) -> float:
    rows, front = [], set[int]()
    for number, (layers, count) in enumerate(stages):
        if number:
            sent = crossing(profile, front) / bandwidth / min(count, stages[number - 1][1])
            rows.append((sent, sent, 0.0))
        times = [sum(getattr(profile.layers[k], f"{way}_seconds") for k in layers) for way in ("forward", "backward")]
        reduce = 2 * (count - 1) * weights_of(profile, layers) / count / bandwidth
        rows.append((times[0] / count, times[1] / count, reduce))
        front |= set(layers)
    return float(pivot_seconds(*zip(*rows, strict=True), num_microbatches=num_microbatches))


def stages_of(order: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> Stages:
    return [(tuple(sorted(order[first : last + 1])), count) for first, last, count in spans]


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("group", range(3))
def test_partitions_of_graphs_are_equal_to_the_best_of_all(group, capped):
    for seed in range(15 * group, 15 * group + 15):
        rng = random.Random(seed)
        profile, ranks, bandwidth = draw(rng, rng.randint(1, 6)), rng.randint(1, 4), rng.uniform(0.3, 4.0)
        everything = list(every_partition(profile, range(len(profile.layers)), ranks))
        held = [memory_of(profile, stages) for stages in everything]
        cap = max(1e-3, rng.choice(held)) if capped else None
        times = [
            period_of(profile, stages, bandwidth)
            for stages, size in zip(everything, held, strict=True)
            if cap is None or size <= cap
        ]
        found = partition_layers(profile, [(ranks, bandwidth)], memory_cap=cap)
        assert found.period_seconds == pytest.approx(min(times), rel=1e-9, abs=1e-12), seed
        stages = stages_of(found.order, [(s.first, s.last, s.replicas) for s in found.stages])
        assert period_of(profile, stages, bandwidth) == pytest.approx(found.period_seconds, rel=1e-9, abs=1e-12)
        assert found.memory_bytes == pytest.approx(memory_of(profile, stages), abs=1e-12)
        assert stages in everything
        assert profile.reordered(found.order).reordered(
            [found.order.index(k) for k in range(len(profile.layers))]
        ) == Profile(profile.layers, profile.ties, None, profile.edges)


def test_partitions_of_graphs_on_levels_are_equal_to_the_best_of_all():
    """Two nodes of two ranks: stages of nodes, with stages inside of each."""
    for seed in range(15):
        rng = random.Random(seed)
        profile, inner, outer = draw(rng, rng.randint(1, 5)), rng.uniform(1.0, 8.0), rng.uniform(0.3, 2.0)
        best = math.inf
        for stages in every_partition(profile, range(len(profile.layers)), 2):
            worst, front = 0.0, set[int]()
            for number, (layers, count) in enumerate(stages):
                inside = math.inf
                for parts in every_partition(profile, layers, 2):
                    inner_worst, here = 0.0, set(front)
                    for k, (some, ranks) in enumerate(parts):
                        work = sum(profile.layers[i].forward_seconds + profile.layers[i].backward_seconds for i in some)
                        sync = 4 * (ranks - 1) * weights_of(profile, some) / (ranks * inner)
                        inner_worst, here = max(inner_worst, (work + sync) / ranks), here | set(some)
                        if k < len(parts) - 1:
                            fewer = min(ranks, parts[k + 1][1])
                            inner_worst = max(inner_worst, 2 * crossing(profile, here) / inner / fewer)
                    inside = min(inside, inner_worst)
                sync = 4 * (count - 1) * weights_of(profile, layers) / (count * outer)
                worst, front = max(worst, (inside + sync) / count), front | set(layers)
                if number < len(stages) - 1:
                    worst = max(worst, 2 * crossing(profile, front) / outer / min(count, stages[number + 1][1]))
            best = min(best, worst)
        found = partition_layers(profile, [(2, inner), (2, outer)])
        assert found.period_seconds == pytest.approx(best, rel=1e-9, abs=1e-12), seed


def test_synchronous_plans_of_graphs_are_equal_to_the_best_of_all():
    for seed in range(20):
        rng = random.Random(seed)
        profile, ranks, bandwidth = draw(rng, rng.randint(1, 6)), rng.randint(1, 4), rng.uniform(0.5, 20.0)
        count = rng.randint(1, 16)
        everything = list(every_partition(profile, range(len(profile.layers)), ranks))
        best = min(step_of(profile, stages, bandwidth, count) for stages in everything)
        found = partition_synchronous(profile, ranks=ranks, bandwidth=bandwidth, num_microbatches=count)
        assert found.step_seconds == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        stages = stages_of(found.order, found.stages)
        assert stages in everything
        assert step_of(profile, stages, bandwidth, count) == pytest.approx(best, rel=1e-9, abs=1e-12)


def chain_of(profile: Profile) -> Profile:
    return Profile(profile.layers, profile.ties, None, tuple(itertools.pairwise(range(len(profile.layers)))))


def test_a_chain_with_edges_is_partitioned_like_one_without():
    for seed in range(10):
        rng = random.Random(seed)
        rows = [(f"layer {k}", *(rng.uniform(0.1, 3.0) for _ in range(4))) for k in range(rng.randint(1, 12))]
        chain = Profile.of(rows, [(0.1, (0, 1))] if len(rows) > 1 else [])
        for levels in ([(5, 1.0)], [(2, 3.0), (3, 1.0)]):
            plain, graph = (partition_layers(each, levels, memory_cap=200.0) for each in (chain, chain_of(chain)))
            assert graph.period_seconds == pytest.approx(plain.period_seconds, rel=1e-12)
            assert [s.replicas for s in graph.stages] == [s.replicas for s in plain.stages]


def test_in_a_graph_with_too_many_cuts_short_layers_stay_together():
    """Three branches of fifteen layers have 4,096 cuts."""
    rng = random.Random(0)
    rows = [(f"layer {k}", rng.uniform(0.1, 1.0), 1.0, rng.uniform(0.1, 1.0), 1.0) for k in range(47)]
    rows[7] = ("short", 1e-3, 1e-3, 1.0, 1.0)
    inside = [(layer, layer + 1) for layer in range(1, 45) if layer % 15]
    graph = Profile.of(rows, edges=[*((0, k) for k in (1, 16, 31)), *inside, *((k, 46) for k in (15, 30, 45))])
    cuts = Cuts(graph)
    assert not cuts.complete
    assert 200 < cuts.count <= MOST_CUTS
    found = partition_layers(graph, [(6, 0.5)])
    assert not found.all_cuts
    of = {layer: k for k, stage in enumerate(found.stages) for layer in found.order[stage.first : stage.last + 1]}
    assert sorted(of) == list(range(47))
    assert all(of[source] <= of[target] for source, target in graph.edges)
    stages = stages_of(found.order, [(s.first, s.last, s.replicas) for s in found.stages])
    assert period_of(graph, stages, 0.5) == pytest.approx(found.period_seconds)
    assert of[7] in (of[6], of[8])


def test_a_graph_with_too_many_cuts_is_cut_in_its_own_order():
    """Twelve branches side by side have 4,096 sets of branches."""
    rows = [("in", 1.0, 2.0, 1.0, 1.0), *((f"branch {k}", 1.0, 2.0, 1.0, 1.0) for k in range(12))]
    wide = Profile.of(rows, edges=[(0, k) for k in range(1, 13)])
    found = partition_layers(wide, [(4, 1e9)])
    assert not found.all_cuts
    assert found.order == tuple(range(13))
    narrow = Profile.of(rows[:10], edges=[(0, k) for k in range(1, 10)])
    assert partition_layers(narrow, [(4, 1e9)]).all_cuts


GRAPH = """\
node1 -- Input0 -- forward_compute_time=5.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
node3 -- Linear(2, 2) -- forward_compute_time=2.000, backward_compute_time=4.000, activation_size=32.0, parameter_size=1
node2 -- LSTM(2, 2) -- forward_compute_time=1.000, backward_compute_time=3.000, activation_size=[64.0; 8.0; 8.0], \
parameter_size=128.000 -- stage_id=0
node4 -- __getitem__(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
node5 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=8.0, parameter_size=0.0
\tnode1 -- node2
\tnode2 -- node4
\tnode2 -- node5
\tnode4 -- node3
\tnode2 -- node3
"""


def test_profiles_of_pipedreams_authors_are_read():
    """Milliseconds; several outputs add up; inputs and what nothing reads are left out; layers in order of edges."""
    assert parse_graph(GRAPH) == Profile.of(
        [
            ("LSTM(2, 2)", 0.001, 0.003, 80.0, 128.0),
            ("__getitem__(0)", 0.0, 0.0, 64.0, 0.0),
            ("Linear(2, 2)", 0.002, 0.004, 32.0, 1.0),
        ],
        edges=[(0, 1), (0, 2), (1, 2)],
    )
    profile = parse_graph(GRAPH)
    assert parse_profile(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("node9", "line 12: 'node9': must be a layer such as 'node1 -- NAME"),
        ("node2 -- node9", "line 12: the edge names node9, which has no line of its own"),
        ("node3 -- node2", "edges lead around: "),
        (GRAPH.splitlines()[1], "line 12: the second layer node3"),
        (GRAPH.splitlines()[1].replace("node3", "x").replace("2.000", "nan;;"), "line 12: 'nan;;' must be a number"),
        (GRAPH.splitlines()[1].replace("node3", "x").replace("2.000", "-2"), "forward_seconds=-0.002"),
    ],
)
def test_a_wrong_line_is_named(line, told):
    with pytest.raises(InputError, match=re.escape(told)):
        parse_graph(f"{GRAPH}\n{line}")


@pytest.mark.parametrize("edge", [[0, 0], [1, 0], [0, 3], [-1, 1]])
def test_edges_lead_to_later_layers(edge):
    with pytest.raises(
        InputError, match=r"edges\[0\]=.*: must be a layer and a later layer, of 0 to 2\. List layers in"
    ):
        Profile.of(((f"layer {k}", 1.0, 1.0, 1.0, 1.0) for k in range(3)), edges=[tuple(edge)])


def test_the_command_reads_graphs(tmp_path, capsys):
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    words = ["partition", "--profile", str(path), "--ranks", "2", "--bandwidth", "1e5"]
    assert main([*words, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert [stage["names"] for stage in numbers["stages"]] == [["LSTM(2, 2)"], ["__getitem__(0)", "Linear(2, 2)"]]
    assert main([*words, "--schedule", "dapple", "--microbatches", "4", "--memory-cap", "1e6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == [217.0]
    assert main(words) == 0
    assert "__getitem__(0) .. Linear(2, 2)" in capsys.readouterr().out
