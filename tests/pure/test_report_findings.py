"""Slow ranks, slow links, waits for samples, spikes and faults in run reports, from made-up rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeloom.errors import InputError
from pipeloom.report.findings import MOST_FINDINGS, events, slow_findings
from pipeloom.report.html import write_report
from pipeloom.report.run_files import Rewind
from pipeloom.watch.run_view import RunView

from .test_reports import METRICS, page_of, run_directory

SLOW = {"replica": 0, "rank": 1, "kind": "forwards", "factor": 2.1, "share": 0.17}
WAITS = {"replica": 1, "rank": 0, "factor": 2.0, "share": 0.3}
LINK = {"source": 1, "target": 0, "factor": 6.3, "share": 0.23}
NONE = "No step names a slow rank, a slow link or a wait for samples."


def rows(**findings: dict[int, Any]) -> list[dict[str, Any]]:
    """The rows of a run with `findings`: by key, what a step has."""
    return [
        {**row, **{key: found[row["step"]] for key, found in findings.items() if row["step"] in found}}
        for row in METRICS
    ]


def cells(page: str) -> list[list[str]]:
    """The rows of the section's tables."""
    section = page.partition("<h2>Slow ranks, spikes and faults</h2>")[2].partition("</section>")[0]
    found = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    return [row for row in found if row]


def test_each_finding_has_its_steps_kind_rank_factor_and_share(tmp_path: Path) -> None:
    backwards = {**SLOW, "kind": "backwards", "factor": 1.5, "share": 0.1}
    directory = run_directory(
        tmp_path / "run",
        rows(
            stragglers={
                **{step: [SLOW] for step in (3, 4, 5)},
                5: [{**SLOW, "factor": 9.0, "share": 0.5}, backwards],
                6: [backwards],
                **{step: [SLOW] for step in range(18, 21)},
            },
            sample_waits={9: [WAITS]},
            slow_links={step: [LINK] for step in range(10, 15)},
            spike={12: "loss 9.1, limit 5.2"},
            hardware_fault={7: "loss nan & gradient norm nan"},
        ),
    )
    (directory / "rewinds.json").write_text(json.dumps([{"checkpoint": 8, "step": 11, "spike": "loss 7, limit 5"}]))
    for page in (write_report(directory).read_text(encoding="utf-8"), RunView(directory, 1.0).page("n")):
        assert cells(page) == [
            ["3 to 5", "computing: forwards", "rank 1", "2.1", "17.0 %"],
            ["5 to 6", "computing: backwards", "rank 1", "1.5", "10.0 %"],
            ["9", "samples", "rank 0", "2.0", "30.0 %"],
            ["10 to 14", "link", "rank 1 to rank 0", "6.3", "23.0 %"],
            ["18 to 20, the last step", "computing: forwards", "rank 1", "2.1", "17.0 %"],
            ["7", "hardware fault", "loss nan &amp; gradient norm nan"],
            ["11", "loss spike, rewind", "loss 7, limit 5; back to step 8"],
            ["12", "loss spike", "loss 9.1, limit 5.2"],
        ]
        assert '<div class="scroll" tabindex="0" role="region" aria-label="Slow ranks, spikes and faults">' in page
        assert NONE not in page
        assert "Not shown" not in page
    page_of(write_report(directory).read_text(encoding="utf-8"))


def test_a_run_without_findings_says_so(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", METRICS)
    for text in (page_of(write_report(directory).read_text(encoding="utf-8")), RunView(directory, 1.0).page("n")):
        assert NONE in text
        assert "No step has a loss spike or a hardware fault." in text
    run_directory(directory, rows(spike={5: "loss 9.1, limit 5.2"}))
    text = page_of(write_report(directory).read_text(encoding="utf-8"))
    assert NONE in text
    assert "No step has a loss spike" not in text


def test_ranks_are_named_with_their_replica_where_there_are_several(tmp_path: Path) -> None:
    several = [
        {**row, "peak_memory_bytes": [1, 1, 1, 1]} for row in rows(stragglers={4: [SLOW]}, sample_waits={4: [WAITS]})
    ]
    page = write_report(run_directory(tmp_path / "run", several)).read_text(encoding="utf-8")
    assert [row[2] for row in cells(page)] == ["rank 1 of replica 0", "rank 0 of replica 1"]


def test_rows_of_older_versions_have_no_share() -> None:
    old = {key: value for key, value in SLOW.items() if key != "share"}
    (found,) = slow_findings(rows(stragglers={3: [old], 4: [old]}), replicas=False).rows
    assert found == {
        "steps": "3 to 4", "kind": "computing: forwards", "place": "rank 1", "factor": "2.1", "share": "not recorded"
    }  # fmt: skip


@pytest.mark.parametrize("bad", [None, 3, "x", [], {}, [3, None], [[]]])
def test_rows_of_another_form_have_no_findings(bad: Any) -> None:
    keys = ("stragglers", "sample_waits", "slow_links")
    assert slow_findings(rows(**{key: {3: bad} for key in keys}), replicas=False) == ([], 0)
    assert not events(rows(hardware_fault={3: None if isinstance(bad, str) else bad}), []).rows


def test_of_many_findings_those_that_cost_most_are_listed(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step": step, "loss": 1.0} for step in range(1, 401)]
    for row in steps[::2]:
        row["stragglers"] = [{**SLOW, "share": row["step"] / 1000}]
        row["spike"] = f"loss {row['step']}, limit 1"
    found = slow_findings(steps, replicas=False)
    assert found.left_out == 200 - MOST_FINDINGS
    assert [row["steps"] for row in found.rows] == [str(step) for step in range(401 - 2 * MOST_FINDINGS, 400, 2)]
    text = page_of(write_report(run_directory(tmp_path / "run", steps)).read_text(encoding="utf-8"))
    assert f"Not shown: {found.left_out} findings that cost less time." in text
    assert f"Not shown: {found.left_out} earlier events." in text
    assert events(steps, [Rewind(400, 3, "loss 9, limit 1")]).rows[-1]["step"] == "400"


@pytest.mark.parametrize("text", ["", "3", "{}x", "[3]", "[{}]", '[{"step": null, "checkpoint": 1, "spike": "x"}]'])
def test_a_damaged_file_of_rewinds_is_one_line(tmp_path: Path, text: str) -> None:
    directory = run_directory(tmp_path / "run", METRICS)
    (directory / "rewinds.json").write_text(text)
    with pytest.raises(InputError, match=r"rewinds\.json is not a list of rewinds\. Restore or remove it\.") as caught:
        write_report(directory)
    assert "\n" not in str(caught.value)
