"""Collectives as sends: replayed, they give the result; their number and sizes are those of the formulas."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from pipeloom.parallel.traffic import sends
from pipeloom.plan.collectives import (
    ALGORITHMS,
    COLLECTIVES,
    Algorithm,
    Send,
    collective_seconds,
    equal_bytes,
    picture,
    replay,
)
from pipeloom.plan.collectives.sends import SUMMED, Step, held_before, held_behind
from pipeloom.plan.costs.links import ring_link
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.stage_times import table_seconds

RANKS = (*range(1, 18), 24, 31, 33)
EVERY = [pytest.param(each, id=f"{each.collective}-{each.kind}") for pair in ALGORITHMS.values() for each in pair]
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "collectives.md"


def gives(algorithm: Algorithm, ranks: int, steps: tuple[Step, ...]) -> bool:
    """Whether sends give every rank what the collective promises, for random values."""
    collective, chunks = algorithm.collective, algorithm.chunks(ranks)
    source = random.Random(ranks)
    before = [{chunk: source.getrandbits(60) for chunk in mine} for mine in held_before(collective, ranks, chunks)]
    totals: dict[int, int] = {}
    for mine in before:
        for chunk, value in mine.items():
            totals[chunk] = totals.get(chunk, 0) + value
    try:
        *_, behind = replay(steps, before)
    except KeyError:  # a rank sends what it does not have
        return False
    promised = held_behind(collective, ranks, chunks)
    return all(behind[rank].get(chunk) == totals[chunk] for rank in range(ranks) for chunk in promised[rank])


@pytest.mark.parametrize("algorithm", EVERY)
def test_sends_give_the_result_in_the_steps_and_bytes_of_the_formula(algorithm):
    for ranks in RANKS:
        steps = algorithm.steps(ranks)
        assert gives(algorithm, ranks, steps), ranks
        parts = [max(len(send.chunks) for send in step) * algorithm.chunk_part(ranks) for step in steps]
        assert parts == [each.part for each in algorithm.rounds(ranks) for _ in range(each.times)], ranks
        assert len(steps) == algorithm.num_steps(ranks)
        assert sum(parts) == algorithm.moved(ranks)
        for step in steps:
            assert len({send.source for send in step}) == len({send.target for send in step}) == len(step), ranks


def test_formulas_in_words_are_those_of_the_rounds():
    latency, per_byte, size = Fraction(3), Fraction(7), Fraction(1000)
    for pair in ALGORITHMS.values():
        for each in pair:
            for ranks in (2, 3, 8, 13):
                text = each.formula.replace("at most ", "").replace("(p-1)/p", "((p-1)/p)").replace("2 L (", "2*L*(")
                text = text.replace("2 (p-1) (", "2*(p-1)*(").replace("(p-1) (", "(p-1)*(").replace("L (", "L*(")
                text = text.replace("L α", "L*α").replace(" n β", "*n*β").replace(" β", "*β").replace("+*n", "+ n")
                names = {"p": Fraction(ranks), "n": size, "α": latency, "β": per_byte, "L": (ranks - 1).bit_length()}
                said = eval(text, {"__builtins__": {}}, names)
                found = each.num_steps(ranks) * latency + each.moved(ranks) * size * per_byte
                if "at most" in each.formula:
                    assert found <= said
                    assert found == said or ranks & (ranks - 1)
                else:
                    assert found == said, (each.collective, each.kind, ranks)


@pytest.mark.parametrize("algorithm", EVERY)
def test_a_lost_or_doubled_message_is_noticed(algorithm):
    steps = algorithm.steps(5)
    for number, step in enumerate(steps):
        rest = steps[:number], steps[number + 1 :]
        assert not gives(algorithm, 5, (*rest[0], step[1:], *rest[1])), "lost"
        if step[0].adds:
            assert not gives(algorithm, 5, (*rest[0], step, (step[0],), *rest[1])), "doubled"


def test_rounds_use_the_links_that_they_say():
    for pair in ALGORITHMS.values():
        for each in pair:
            for ranks, node in ((16, 4), (12, 8), (17, 3), (24, 6), (9, 8)):
                patterns = [round_ for round_ in each.rounds(ranks) for _ in range(round_.times)]
                for step, round_ in zip(each.steps(ranks), patterns, strict=True):
                    leaving: dict[int, int] = {}
                    for send in step:
                        if send.source // node != send.target // node:
                            leaving[send.source // node] = leaving.get(send.source // node, 0) + 1
                    far = round_.distance
                    if round_.pattern == "pairs" and node % (2 * far) == 0:
                        assert not leaving
                    most = {"shift": min(far, node), "flow": node}.get(round_.pattern, 1)
                    assert max(leaving.values(), default=0) <= most, (each.collective, each.kind, ranks, node)


def test_rings_cost_what_the_cost_model_counts():
    for cluster in CLUSTERS.values():
        for ranks in (2, 5, 8, 16, 24):
            for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
                size, known = 240 * ranks, name.replace("-", "_")
                given = size // ranks if name == "all-gather" else size
                link = ring_link(cluster, 1, ranks, sums=name in SUMMED)
                counted = table_seconds(sends("tp", known, ranks, given), {"tp": ranks}, {"tp": link})
                assert collective_seconds(ALGORITHMS[name][0], cluster, ranks, size) == pytest.approx(counted)


def test_ring_and_tree_take_as_long_at_the_size_between_them():
    crossings = 0
    for cluster in CLUSTERS.values():
        for name in COLLECTIVES:
            size = equal_bytes(name, cluster, 16)
            for much in (1e-3, 1e3, 1e6, 1e10):
                ring, tree = (collective_seconds(each, cluster, 16, much) for each in ALGORITHMS[name])
                assert (tree < ring) == (size is None or much < size), (cluster.name, name, much)
            if size:
                ring, tree = (collective_seconds(each, cluster, 16, size) for each in ALGORITHMS[name])
                assert ring == pytest.approx(tree)
                crossings += 1
    assert crossings > 10


def test_pictures():
    assert picture(ALGORITHMS["all-reduce"][0], 3) == [
        "all-reduce, ring: 2 (p-1) (α + n/p β) (Patarasuk 2009)",
        "          rank 0  rank 1  rank 2",
        "  start   ○○○     ○○○     ○○○",
        "  step 1  ○◐○     ○○◐     ◐○○     0→1 +2  1→2 +0  2→0 +1",
        "  step 2  ●◐○     ○●◐     ◐○●     0→1 +1  1→2 +2  2→0 +0",
        "  step 3  ●◐●     ●●◐     ◐●●     0→1 0  1→2 1  2→0 2",
        "  step 4  ●●●     ●●●     ●●●     0→1 2  1→2 0  2→0 1",
    ]
    assert picture(ALGORITHMS["broadcast"][1], 5)[1:] == [
        "          rank 0  rank 1  rank 2  rank 3  rank 4",
        "  start   ●       ·       ·       ·       ·",
        "  step 1  ●       ·       ·       ·       ●       0→4",
        "  step 2  ●       ·       ●       ·       ●       0→2",
        "  step 3  ●       ●       ●       ●       ●       0→1  2→3",
    ]
    assert picture(ALGORITHMS["all-to-all"][1], 3)[-1] == "  step 2  ●●●     ●●●     ●●●     0→2 0/2  1→0 1/0  2→1 2/1"


def test_the_page_shows_pictures_of_the_command():
    page = PAGE.read_text(encoding="utf-8")
    for name, kind, ranks in (("all-reduce", 0, 4), ("all-reduce", 1, 4), ("all-gather", 1, 6)):
        assert "\n".join(picture(ALGORITHMS[name][kind], ranks)) in page, (name, kind)


def test_all_messages_of_a_step_start_from_what_was_there_before_it():
    swap = (Send(0, 1, (0,)), Send(1, 0, (0,)))
    assert list(replay([swap], [{0: 7}, {0: 9}]))[-1] == [{0: 9}, {0: 7}]
