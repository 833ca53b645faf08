"""Stragglers and spikes in made-up times and losses."""

from __future__ import annotations

import random

import pytest

from pipeloom.train.output.line_limit import LineLimit
from pipeloom.train.output.recent_band import RecentBand
from pipeloom.train.output.stragglers import StragglerWatch


def steps(watch: StragglerWatch, count: int, forwards: list[float], *, load: float = 0.0, seed: int = 1) -> list[str]:
    """The lines of steps with 10 % noise per process and `load` of the whole machine."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        common = 1 + load * draw.random()
        times = [each * common * draw.uniform(0.95, 1.05) for each in forwards]
        lines += watch.observe((times, [2 * each for each in times]), [0.0] * len(times), 8 * max(times)).values()
    return lines


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_rank_slower_than_its_history_is_named_within_20_steps(slow: int, factor: float) -> None:
    watch = StragglerWatch(4)
    assert not steps(watch, 40, [1.0, 1.2, 1.0, 0.8])
    forwards = [1.0, 1.2, 1.0, 0.8]
    forwards[slow] *= factor
    lines = steps(watch, 20, forwards, seed=2)
    assert {line.split(" computes")[0] for line in lines} == {f"rank {slow}"}
    assert {(found["rank"], found["kind"]) for found in watch.factors()} == {(slow, "forwards"), (slow, "backwards")}
    assert all(abs(float(found["factor"]) / factor - 1) < 0.2 for found in watch.factors())
    ended = steps(watch, 20, [1.0, 1.2, 1.0, 0.8], seed=3)
    assert any("as fast as before" in line for line in ended)
    assert not watch.factors()


def test_a_rank_slow_from_the_start_is_named_beside_its_equal_in_another_replica() -> None:
    watch = StragglerWatch(2)
    lines = steps(watch, 20, [1.0, 3.0, 1.0, 6.0])
    assert lines
    assert all(line.startswith("rank 1 of replica 1 ") and "than other replicas" in line for line in lines)


def test_a_machine_that_is_loaded_as_a_whole_has_no_straggler() -> None:
    watch = StragglerWatch(2)
    assert not steps(watch, 60, [1.0, 1.1], load=0.5)
    assert not steps(watch, 60, [2.5, 2.7], load=2.0, seed=2)
    assert not steps(watch, 60, [1.0, 1.1], seed=3)


def test_waiting_for_samples_is_told_apart_from_computing() -> None:
    watch = StragglerWatch(2)
    lines = [line for _ in range(20) for line in watch.observe(([1.0, 1.0], [2.0, 2.0]), [0.0, 3.0], 10.0).values()]
    assert lines == ["rank 1 waits for its samples during 30% of the step"]


def test_lines_come_at_most_once_a_minute_with_the_last_text_of_each_key() -> None:
    limit = LineLimit()
    limit.add("a", "first")
    assert limit.line(100.0) == "first"
    limit.add("a", "second")
    limit.add("b", "other")
    limit.add("a", "third")
    assert limit.line(159.0) is None
    assert limit.line(160.0) == "third; other"
    assert limit.line(300.0) is None


def test_spikes_are_far_above_recent_steps_and_a_new_level_is_accepted() -> None:
    draw, band = random.Random(1), RecentBand()
    assert not any(band.observe(4 - 0.02 * k + draw.gauss(0, 0.05), draw.uniform(0.5, 1.0)) for k in range(100))
    assert (band.observe(5.2, 0.8) or "").startswith("loss 5.2, limit ")
    assert (band.observe(2.0, 9.0) or "").startswith("gradient norm 9, limit ")
    assert sum(band.observe(6.0, 0.8) is not None for _ in range(40)) <= 18
