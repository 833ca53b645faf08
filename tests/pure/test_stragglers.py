"""Stragglers and spikes in made-up times and losses."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeloom.ir import Action, Op
from pipeloom.train.output.line_limit import LineLimit
from pipeloom.train.output.recent_band import RecentBand
from pipeloom.train.output.slow_links import LinkWatch, link_waits
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
    assert {(found["rank"], found["kind"]) for found in watch.slow()} == {(slow, "forwards"), (slow, "backwards")}
    assert all(abs(float(found["factor"]) / factor - 1) < 0.2 for found in watch.slow())
    ended = steps(watch, 20, [1.0, 1.2, 1.0, 0.8], seed=3)
    assert any("as fast as before" in line for line in ended)
    assert not watch.slow()


def test_the_factor_follows_between_two_lines() -> None:
    watch = StragglerWatch(2)
    assert not steps(watch, 40, [1.0, 1.0])
    assert steps(watch, 12, [3.0, 1.0])
    assert not steps(watch, 20, [3.6, 1.0])  # too small a change for a line
    assert all(abs(float(found["factor"]) / 3.6 - 1) < 0.05 for found in watch.slow())


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_the_share_is_what_a_straggler_computes_longer_in_a_step(factor: float) -> None:
    watch = StragglerWatch(2)
    for step in range(60):
        now = factor if step >= 40 else 1.0
        watch.observe(([1.0, now], [2.0, 2.0]), [0.0, 0.0], 9.0 + now)
    share = pytest.approx((factor - 1.0) / (9.0 + factor))
    assert watch.slow() == [{"replica": 0, "rank": 1, "kind": "forwards", "factor": factor, "share": share}]


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
    text = (
        "rank 1 waits for its samples during 30% of the step; computing and waiting take 2.0 times as long as computing"
    )
    assert lines == [text]
    assert not watch.slow()
    assert watch.waiting() == [{"replica": 0, "rank": 1, "factor": 2.0, "share": 0.3}]
    for _ in range(5):
        watch.observe(([1.0, 1.0], [2.0, 2.0]), [0.0, 12.0], 20.0)
    assert watch.waiting() == [{"replica": 0, "rank": 1, "factor": 2.0, "share": 0.3}]  # the median of 12 steps
    for _ in range(5):
        watch.observe(([1.0, 1.0], [2.0, 2.0]), [0.0, 12.0], 20.0)
    assert watch.waiting() == [{"replica": 0, "rank": 1, "factor": 5.0, "share": 0.6}]
    lines = [line for _ in range(20) for line in watch.observe(([1.0, 1.0], [2.0, 2.0]), [0.0, 0.1], 7.0).values()]
    assert lines == ["rank 1 no longer waits for its samples"]
    assert not watch.waiting()


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


def records(forward: float, backward: float, *, compute: float = 1.0, ahead: float = 0.0, seed: int = 1) -> Any:
    """A step of GPipe on two ranks, whose messages take `forward` and `backward` seconds; F takes 1 s on rank 0.

    `compute` is what F and B take on rank 1, whose clock is `ahead`.
    """
    draw, count, now = random.Random(seed), 6, 0.0
    first, second = [], []
    sends, arrivals = [], []
    for b in range(count):
        first.append((Action(0, Op.F, b), now, now + 1))
        first.append((Action(0, Op.SEND_F, b), now + 1, now + 1.001))
        sends.append(now + 1)
        now += 1.001
    then = 0.0
    for b in range(count):
        end = max(then, sends[b] + forward * draw.uniform(0.9, 1.1)) + 0.001
        second.append((Action(1, Op.RECV_F, b), then, end))
        second.append((Action(1, Op.F, b), end, end + compute))
        then = end + compute
    for b in range(count):
        second.append((Action(1, Op.B, b), then, then + compute))
        second.append((Action(1, Op.SEND_B, b), then + compute, then + compute + 0.001))
        arrivals.append(then + compute + backward * draw.uniform(0.9, 1.1))
        then += compute + 0.001
    for b in range(count):
        end = max(now, arrivals[b]) + 0.001
        first.append((Action(0, Op.RECV_B, b), now, end))
        first.append((Action(0, Op.B, b), end, end + 1))
        now = end + 1
    return [(0, first), (1, [(action, start + ahead, end + ahead) for action, start, end in second])]


def seen(watch: LinkWatch, count: int, forward: float, backward: float, **more: Any) -> list[str]:
    return [line for n in range(count) for line in watch.observe(records(forward, backward, seed=n, **more)).values()]


@pytest.mark.parametrize("ahead", [0.0, -4e4, 5e3])
def test_a_slow_link_is_named_with_its_direction_and_ends(ahead: float) -> None:
    watch = LinkWatch()
    assert not seen(watch, 6, 0.05, 0.05, ahead=ahead)
    assert not watch.suspects
    assert not seen(watch, 1, 0.05, 0.8, ahead=ahead)
    assert watch.suspects
    (line,) = seen(watch, 5, 0.05, 0.8, ahead=ahead)
    assert line.startswith("messages from rank 1 to rank 0 are ")
    assert not watch.suspects
    (slow,) = watch.slow()
    assert (slow["source"], slow["target"]) == (1, 0)
    assert slow["factor"] > 5
    assert 0.05 < slow["share"] < 0.5
    assert seen(watch, 3, 0.05, 0.05, ahead=ahead) == ["messages from rank 1 to rank 0 are as fast as before"]
    assert not watch.slow()


@pytest.mark.parametrize("ahead", [-4e4, 5e3])
def test_a_link_that_was_waited_for_before_is_named_between_machines(ahead: float) -> None:
    watch = LinkWatch()
    assert not seen(watch, 6, 0.05, 0.05, ahead=ahead, compute=0.5)
    assert seen(watch, 5, 1.2, 0.05, ahead=ahead, compute=0.5)[0].startswith("messages from rank 0 to rank 1 are ")


def test_slow_computing_is_no_slow_link() -> None:
    watch = LinkWatch()
    assert not seen(watch, 6, 0.05, 0.05)
    assert not seen(watch, 6, 0.05, 0.05, compute=3.0)
    assert not watch.slow()


def test_links_that_all_become_slower_are_a_loaded_machine() -> None:
    watch = LinkWatch()
    assert not seen(watch, 6, 0.05, 0.05)
    assert not seen(watch, 6, 0.4, 0.4)


@pytest.mark.parametrize("ahead", [-4e4, 5e3])
def test_clocks_of_two_machines_do_not_count(ahead: float) -> None:
    same, other = (link_waits(records(0.05, 0.8, ahead=each)) for each in (0.0, ahead))
    assert sum(other[0, 1]) + sum(other[1, 0]) == pytest.approx(sum(same[0, 1]) + sum(same[1, 0]), rel=0.6)
    assert max(other[0, 1]) < 1
    watch = LinkWatch()
    assert not seen(watch, 6, 0.05, 0.05, ahead=ahead)
    assert not watch.slow()
