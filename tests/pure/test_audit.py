"""What `make audit` makes of the output of pip-audit."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.audit import CONSTRAINTS, judged, main

GOOD = '{"dependencies": [{"name": "rich", "version": "15.0.0", "vulns": []}], "fixes": []}'
BAD = (
    '{"dependencies": [{"name": "numpy", "version": "2.4.6", "vulns": [{"id": "CVE-2026-1", "fix_versions": ["9.0"], '
    '"aliases": ["GHSA-x"]}]}, {"name": "rich", "version": "15.0.0", "vulns": []}, {"name": "own", "skip_reason": '
    '"unknown"}], "fixes": []}'
)
OFFLINE = "Traceback\n  raise ProxyError(e)\nrequests.exceptions.ProxyError: HTTPSConnectionPool: Max retries exceeded"


def test_a_known_vulnerability_fails_and_is_named() -> None:
    code, lines = judged(BAD, "Found 1 known vulnerability in 1 package")
    assert code == 1
    assert lines[:2] == ["own: not audited: unknown", "numpy 2.4.6: CVE-2026-1 GHSA-x, fixed in 9.0"]


def test_what_was_audited_is_told() -> None:
    assert judged(GOOD, "") == (0, ["make audit: no known vulnerability; audited: 1"])


@pytest.mark.parametrize(("errors", "code", "word"), [(OFFLINE, 0, "SKIPPED"), ("error: no such option", 1, "failed")])
def test_only_a_missing_network_is_skipped(errors: str, code: int, word: str) -> None:
    found, (line,) = judged("", errors)
    assert found == code
    assert word in line
    assert errors.splitlines()[-1] in line


def test_without_the_tool_it_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 0
    assert "SKIPPED" in capsys.readouterr().out


def test_every_version_is_pinned() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    assert any(line.startswith("pip-audit==") for line in lines)
