"""What a run opens and writes: no modes that umask forbids, no variables of the environment, no silent open port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeloom.processes.rendezvous import open_store
from tests.cpu.train_runs import local, text  # noqa: F401

SECRET = "token-4711"


def test_modes_follow_umask_and_no_file_has_the_environment(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    out = tmp_path / "runs" / "out"
    before = os.umask(0o077)
    try:
        local(text, out, "--steps=3")
    finally:
        os.umask(before)
    paths = [out, *out.rglob("*")]
    assert {path.name for path in paths} >= {"environment.json", "report.html", "checkpoint-3", "config.yaml"}
    assert not [path for path in paths if path.stat().st_mode & 0o077]
    assert not [path for path in paths if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(("address", "told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_store_on_all_interfaces_is_told_with_the_way_out(
    address: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with socket.create_server((address, 0)) as server:
        port = str(server.getsockname()[1])
        line = open_store({"MASTER_PORT": port})
    assert open_store({}) is None  # pipeloom's own launcher
    assert (line is not None) == told
    assert line is None or line.startswith(f"MASTER_PORT={port}: the store in which the ranks met listens on all")
