"""Which of several ranks without progress holds up the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.processes.hang_report import NoticeTimes, RankReport, Verdict, judge, late, notice

SILENT = {2: "rank 2, process 7, is stopped"}
TIMES = NoticeTimes(30.0, 60.0)


def report(rank: int, waits: tuple[int, ...] | None, *, hung: bool = True, seconds: float = 6.0) -> RankReport:
    return RankReport(
        rank=rank, name=f"rank {rank}", phase="step 3", action=f"{rank}F1", seconds=seconds, waits=waits,
        line="model.py:3 in forward", hung=hung,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "silent", "culprits"),
    [
        ([report(0, (1,)), report(1, (2,)), report(2, None)], {}, (2,)),
        ([report(0, (1,)), report(1, (2,))], SILENT, (2,)),
        ([report(0, (1, 2, 3)), report(1, None), report(2, (0, 1, 3)), report(3, (0, 1, 2))], {}, (1,)),
        ([report(0, (1,)), report(1, None), report(2, None, seconds=9.0)], {}, (2,)),  # the first of two
        ([report(0, None)], {}, (0,)),
        ([report(0, (1,)), report(1, (0,))], SILENT, (2,)),  # a rank that nobody names still has to answer
    ],
)
def test_the_rank_that_waits_for_nobody_is_named(
    reports: list[RankReport], silent: dict[int, str], culprits: tuple[int, ...]
) -> None:
    found = judge(reports, silent, 5.0)
    assert found.culprits == culprits
    assert found.line.startswith(f"rank {culprits[0]}")
    assert found.line.endswith("raise the watchdog's limit of 5 s (--watchdog_seconds).")


def test_a_busy_rank_for_which_others_wait_is_no_hang() -> None:
    assert judge([report(0, (1,)), report(1, None, hung=False)], {}, 5.0) == Verdict((), "")


def test_a_cycle_of_waits_is_told() -> None:
    found = judge([report(0, (1,)), report(1, (0,))], {}, 5.0)
    assert found.culprits == ()
    assert "the ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0" in found.line


def test_a_rank_that_can_ask_nobody_says_for_whom_it_waits_and_what_does_not_answer() -> None:
    reason = "host-1 gets no answer from host-0"
    found = judge([report(1, (0,))], {}, 5.0, reason)
    assert found.culprits == (0,)
    place = "in step 3, action 1F1 (stage 1, micro-batch 1)"
    assert found.line.startswith(f"rank 1 waits for rank 0 {place}: no progress for 6.0 s, and {reason}. ")
    assert judge([report(1, None)], {}, 5.0, reason).line.startswith("rank 1 hangs in step 3")


def test_the_line_has_stage_action_and_micro_batch() -> None:
    found = judge([report(0, (1,)), report(1, None)], {}, 5.0).line
    assert found.startswith(
        "rank 1 hangs in step 3, action 1F1 (stage 1, micro-batch 1), at model.py:3 in forward: no progress for 6.0 s; "
        "rank 0 waits for it."
    )
    again = report(1, (0,))
    assert RankReport.from_json(again.to_json()) == again


def test_where_no_checkpoint_is_complete_in_time_the_ranks_that_wait_for_none_are_named() -> None:
    def is_at(rank: int, seconds: float) -> str:
        place = f"in step 3, action {rank}F1 (stage {rank}, micro-batch 1)"
        return f"rank {rank} is {place}, at model.py:3 in forward, without progress for {seconds} s"

    waits, hangs = report(0, (1,)), report(1, None, seconds=4.0)
    assert late([waits, hangs, report(2, (0, 1))], {}) == f"{is_at(1, 4.0)}; ranks 0, 2 wait for it"
    assert late([waits, hangs, report(2, None)], {}) == f"{is_at(2, 6.0)}; {is_at(1, 4.0)}"
    assert late([waits, report(1, (2,))], SILENT) == f"{SILENT[2]}; ranks 0, 1 wait for it"
    assert late([waits, report(1, (0,))], {}).startswith("the ranks wait for each other: rank 0 waits for rank 1; ")
    assert late([report(rank, None) for rank in range(9)], {}).endswith("; 5 more ranks")


def patient(rank: int, waits: tuple[int, ...] | None, seconds: float = 33.0) -> RankReport:
    return replace(report(rank, waits, hung=False, seconds=seconds), phase="evaluation after step 3", limit_seconds=60)


def test_a_notice_says_where_ranks_are_and_when_the_run_ends() -> None:
    assert notice([patient(0, (1,)), patient(1, None, 31.4)], {}, TIMES) == (
        "no progress: rank 1 in evaluation after step 3, action 1F1 (stage 1, micro-batch 1) for 31 s, at "
        "model.py:3 in forward; rank 0 in evaluation after step 3, action 0F1 (stage 0, micro-batch 1) for 33 s, "
        "waits for rank 1. The watchdog ends the run after 27 s more without progress."
    )


def test_a_notice_names_a_rank_that_does_not_answer() -> None:
    found = notice([patient(0, (1,)), patient(1, (2,), 2.0)], SILENT, TIMES)
    assert found.startswith("no progress: rank 2, process 7, is stopped; rank 0 in evaluation")
    assert "rank 1 in" not in found  # it waits since 2 s


def test_a_notice_of_many_ranks_is_one_short_line() -> None:
    found = notice([*(patient(rank, (9,)) for rank in range(9)), patient(9, None)], {}, TIMES)
    assert found.startswith("no progress: rank 9 in ")
    assert "; 6 more ranks. The watchdog" in found


@pytest.mark.parametrize(
    ("reports", "silent"),
    [
        ([patient(0, (1,)), patient(1, (2,)), patient(2, None, 2.0)], True),
        ([patient(0, (1, 2)), patient(1, None), patient(2, None, 2.0)], False),
        ([patient(0, (1,)), patient(1, (0,))], False),
        ([patient(0, None, 2.0)], True),
    ],
)
def test_ranks_that_wait_for_one_with_progress_are_no_news(reports: list[RankReport], silent: bool) -> None:
    assert (notice(reports, {}, TIMES) == "") is silent


def test_notices_come_ever_more_rarely() -> None:
    times, told = NoticeTimes(30.0, 60.0), []
    for now in range(1000):
        if times.is_due("evaluation after step 3", float(now), 5000.0 + now):
            times.take_part(float(now), 5000.0 + now)
            told.append(now)
    assert told == [30, 90, 210, 450, 930]


def test_notices_come_at_most_once_a_minute_whoever_asks() -> None:
    times = NoticeTimes(30.0, 60.0)
    times.take_part(2.0, 5000.0)  # asked by another rank, while this one makes progress
    assert not times.is_due("step 1", 59.0, 5059.0)
    assert times.is_due("step 1", 60.0, 5060.0)
    times.take_part(60.0, 5060.0)
    assert not times.is_due("step 2", 30.0, 5119.0)
    assert times.is_due("step 2", 31.0, 5120.0)
