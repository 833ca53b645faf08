"""Drawn collectives between processes: their results are compared with replays, and all are timed."""

from __future__ import annotations

import json

from pipeloom.cli import main
from pipeloom.plan.collectives import COLLECTIVES


def test_processes_run_the_drawn_sends(capsys):
    assert main(["collectives", "--measure", "--devices", "3", "--bytes", "4000", "--draw", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    machine = answer["machine"]
    assert machine["processes"] == 3
    assert list(machine["library_seconds"]) == list(COLLECTIVES)
    assert min(machine["latency_seconds"], machine["bytes_per_second"], *machine["library_seconds"].values()) > 0
    for row in answer["collectives"]:
        by_formula = row["steps"] * machine["latency_seconds"] + row["bytes_in_turn"] / machine["bytes_per_second"]
        assert abs(row["machine_seconds"] / by_formula - 1) < 1e-9
        assert row["measured_seconds"] > 0
