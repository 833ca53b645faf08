"""`pipeloom doctor` tries what training needs, and its exit code says whether it is all there."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from pipeloom.cli import doctor
from pipeloom.errors import InputError

ROOT = Path(__file__).parents[2]


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    code = doctor.main(["--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, {check["name"]: check for check in answer["checks"]}, answer


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks, answer = report(capsys)
    assert code == 0
    assert answer["can_train"] is True
    assert checks["torch"]["found"].startswith(torch.__version__.split("+")[0])
    assert checks["gloo"]["ok"]
    assert checks["cuda"]["ok"] == (torch.cuda.device_count() > 0)
    assert f"{len(os.sched_getaffinity(0))} cores" in checks["cpu"]["found"]
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(checks) + 1
    assert lines[-1].endswith("can train on this machine")


def test_cores_are_those_of_the_affinity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert report(capsys)[1]["cpu"]["found"].startswith("1 cores usable")


def test_without_gloo_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    code, checks, answer = report(capsys)
    assert code == 1
    assert answer["can_train"] is False
    assert not checks["gloo"]["ok"]
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "MISSING  gloo" in out
    assert checks["gloo"]["fix"] in out


def test_a_missing_or_old_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"scipy": None, "torch": "2.9.1+cu128", "numpy": "1.26.0", "tokenizers": None}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda module: versions[module] if module in versions else real(module))
    code, checks, _ = report(capsys)
    assert code == 1
    assert (checks["scipy"]["ok"], checks["scipy"]["fix"]) == (False, "pip install 'scipy>=1.11'")
    assert not checks["torch"]["ok"]
    assert checks["numpy"]["ok"]
    assert (checks["tokenizers"]["ok"], checks["tokenizers"]["fix"]) == (False, "pip install 'pipeloom[tokenizers]'")


def test_missing_extras_do_not_matter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda module: None if module in doctor._EXTRAS else real(module))
    assert report(capsys)[0] == 0


def test_a_machine_without_loopback_cannot_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    code, checks, _ = report(capsys)
    assert code == 1
    assert "Operation not permitted" in checks["loopback port"]["found"]


def test_without_memfd_training_goes_on_over_gloo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    code, checks, _ = report(capsys)
    assert code == 0
    assert not checks["shared memory"]["ok"]


def test_the_tries_leave_no_descriptor_open() -> None:
    doctor.examine()
    before = set(os.listdir("/proc/self/fd"))
    doctor._try_shared_memory()
    doctor._try_loopback()
    assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests left may be closed meanwhile


def test_a_mistyped_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--jsn"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--json" in error


def test_what_can_be_installed_beside_is_used_and_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tools = {"dev", "docs", "mutants", "audit", "schedulers", "skypilot"}  # of developers: nothing else imports them
    extras = {name: re.match(r"\w+", packages[-1])[0] for name, packages in project.items() if name not in tools}
    for extra, package in extras.items():
        room = "benchmarks" if extra == "benchmarks" else "src"
        sources = (path.read_text() for path in (ROOT / room).rglob("*.py"))
        imports = re.compile(rf'^\s*(import|from) {package}\b|"{package}"', re.MULTILINE)
        assert any(imports.search(source) for source in sources), extra
    del extras["benchmarks"]
    fixes = {module: package for module, (_, package) in doctor._EXTRAS.items()}
    assert fixes == {package: f"'pipeloom[{extra}]'" for extra, package in extras.items()}


@pytest.mark.parametrize(
    ("name", "said"),
    [("local.txt", "must end in .json"), ("file/below/local.json", "Not a directory. Use a writable path.")],
)
def test_where_a_measurement_cannot_be_kept_is_told_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr("pipeloom.train.machine.measure.measure_machine", lambda: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=said):
        doctor.main(["--measure", "--out", str(tmp_path / name)])
