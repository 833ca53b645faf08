"""Chains of layers that share weights: every stage holds a shared one once, cuts are the best of all."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeloom.split.chain_partition import Tie, find_ties, partition


def test_what_layers_share_is_found_once_for_each_group_of_layers():
    layers = [{"table": 40, "norm": 3}, {"a": 5}, {"norm": 3, "b": 1}, {"table": 40, "a": 5, "more": 7}]
    assert find_ties(layers) == [Tie(40, (0, 3)), Tie(3, (0, 2)), Tie(5, (1, 3))]
    assert find_ties([{"x": 1, "y": 2}, {"x": 1, "y": 2}, {"x": 1, "y": 2}]) == [Tie(3, (0, 1, 2))]
    assert find_ties([{"x": 1}, {"y": 1}]) == []


def holdings(rng: random.Random, num_layers: int) -> list[dict[str, int]]:
    """For every layer the sizes of its parameters, many of them in several layers."""
    sizes = {f"p{k}": rng.randint(1, 9) for k in range(6)}
    return [{name: sizes[name] for name in rng.sample(sorted(sizes), rng.randint(0, 3))} for _ in range(num_layers)]


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_of_layers_that_share_is_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    layers = holdings(rng, rng.randint(1, 8))
    num_stages = rng.randint(1, len(layers))

    def loads(counts: list[int]) -> list[int]:
        ends = list(itertools.accumulate(counts))
        stages = [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return [sum({k: v for layer in stage for k, v in layer.items()}.values()) for stage in stages]

    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    all_counts = [[b - a for a, b in itertools.pairwise([0, *cut, len(layers)])] for cut in cuts]
    if sum(map(bool, layers)) >= num_stages:
        all_counts = [counts for counts in all_counts if min(loads(counts)) > 0]
    found = partition([sum(layer.values()) for layer in layers], num_stages, find_ties(layers))

    def heaviest(counts: list[int]) -> list[int]:
        return [max(loads(counts)[stage:]) for stage in range(num_stages)]

    assert heaviest(found) == min(map(heaviest, all_counts))
    assert found in all_counts
