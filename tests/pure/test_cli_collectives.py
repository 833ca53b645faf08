"""`pipeloom collectives`: its table, pictures, JSON and errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom.cli import main
from pipeloom.plan.collectives import ALGORITHMS, COLLECTIVES, collective_seconds, picture
from pipeloom.plan.costs.named_clusters import CLUSTERS


def shown(capsys, line: str) -> str:
    assert main(["collectives", *line.split()]) == 0
    return capsys.readouterr().out


def test_pictures_then_a_table(capsys):
    text = shown(capsys, "--cluster dgx-h100 --devices 16 --bytes 1MiB")
    for pair in ALGORITHMS.values():
        for each in pair:
            assert "\n".join(picture(each, 4)) in text
    rows = [line for line in text.splitlines() if line.split("  ")[0] in COLLECTIVES]
    assert len(rows) == 2 * len(COLLECTIVES)
    assert "404.9 µs" in shown(capsys, "all-reduce --cluster dgx-h100 --devices 16 --bytes 16MiB --draw 0")
    assert shown(capsys, "gather --draw 0").startswith("collective")
    few = shown(capsys, "gather --devices 3")
    assert "rank 2" in few
    assert "rank 3" not in few


def test_json_has_sends_and_seconds(capsys):
    answer = json.loads(shown(capsys, "all-gather scatter --cluster p3.16xlarge --bytes 4000 --draw 5 --json"))
    assert {key: answer[key] for key in ("cluster", "devices", "bytes", "drawn_ranks")} == {
        "cluster": "p3.16xlarge",
        "devices": 8,
        "bytes": 4000,
        "drawn_ranks": 5,
    }
    found = [(row["collective"], row["algorithm"]) for row in answer["collectives"]]
    assert found == [(name, kind) for name in ("all-gather", "scatter") for kind in ("ring", "tree")]
    for row in answer["collectives"]:
        algorithm = ALGORITHMS[row["collective"]][row["algorithm"] == "tree"]
        assert row["seconds"] == collective_seconds(algorithm, CLUSTERS["p3.16xlarge"], 8, 4000)
        assert row["bytes_in_turn"] == 3500
        assert [[tuple(s.values()) for s in step] for step in row["sends"]] == [
            [(s.source, s.target, list(s.chunks), s.adds) for s in sorted(step)] for step in algorithm.steps(5)
        ]
    (alone,) = json.loads(shown(capsys, "reduce --algorithm tree --draw 0 --json"))["collectives"]
    assert alone["seconds"] is None
    assert "sends" not in alone


def test_a_large_cluster_takes_no_time(capsys):
    answer = json.loads(shown(capsys, "--cluster dgx-h100 --devices 1000000 --draw 0 --json"))
    assert [row["steps"] for row in answer["collectives"] if row["collective"] == "all-reduce"] == [1_999_998, 40]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("all-redcue", "argument 'all-redcue': must be one of broadcast, reduce, all-reduce,"),
        ("--cluster dgx-h300", "--cluster=dgx-h300: must be p3.16xlarge,"),
        ("--devices 1", "--devices 1: must be from 2 to 1,000,000."),
        ("--devices 0 --measure", "--devices 0: must be from 2 to"),
        ("--devices 5000 --measure", "--devices 5000: must be from 2 to"),
        ("--draw 1", "--draw 1: must be 0, for no pictures, or from 2 to 16 ranks."),
        ("--bytes 0", "--bytes 0: must be at least 1."),
    ],
)
def test_errors(capsys, line, error):
    assert main(["collectives", *line.split()]) == 2
    found = capsys.readouterr().err
    assert error in found
    assert len(found.splitlines()) == 1


def test_nodes_of_one_device(capsys, tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(replace(CLUSTERS["dgx-h100"], devices_per_node=1).to_json())
    assert json.loads(shown(capsys, f"gather --cluster {file} --json"))["devices"] == 2
