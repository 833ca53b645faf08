"""Which of several ranks without progress holds up the others."""

from __future__ import annotations

import pytest

from pipeloom.processes.hang_report import RankReport, Verdict, judge

SILENT = {2: "rank 2, process 7, is stopped"}


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
