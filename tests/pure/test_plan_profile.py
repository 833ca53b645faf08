"""`pipeloom plan --profile`: the search over layers of a file."""

from __future__ import annotations

import json

import pytest

from pipeloom.cli import main
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.partition import Profile
from pipeloom.plan.plan import Plan
from pipeloom.plan.profile_units import units_of
from pipeloom.plan.profiled_costs import ProfiledCosts
from pipeloom.plan.search.best_first import find_plans
from pipeloom.plan.search.request import Request

# Seconds of forward and backward, and bytes of output, weights, and what the forward keeps.
ROWS = [(f"layer{n}", 0.01 * (1 + n % 3), 0.02 * (1 + n % 3), 2e6, 1e6, 6e6) for n in range(6)]
NOT_KEPT = [row[:5] for row in ROWS]


def plan(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["plan", "--cluster", "dgx-a100-80", "--devices", "4", "--batch.size", "32", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def written(tmp_path):
    def write(rows, **more) -> str:
        path = tmp_path / "profile.json"
        path.write_text(Profile.of(rows, **more).to_json())
        return str(path)

    return write


def test_as_good_as_simulating_everything(written, capsys):
    words = ("--profile", written(ROWS, samples=4), "--memory.cap", "40MB", "--json", "--top", "1")
    found, every = (json.loads(plan(capsys, *words, *more)[1]) for more in ((), ("--exhaustive",)))
    best = found["plans"][0]
    assert best["step_seconds"] <= 1.01 * every["plans"][0]["step_seconds"]
    assert max(best["peak_bytes"]) <= 40e6
    assert best["microbatch_size"] == 4
    assert sum(best["blocks"]) == len(ROWS)
    # All work on four devices, evenly: no plan is faster.
    work = sum(row[1] + row[2] for row in ROWS) * 32 / 4 / 4
    assert best["step_seconds"] >= work
    reasons = " ".join(found["refused"])
    assert "a profile has no times of parts of layers" in reasons
    assert "the profile has times of micro-batches of 4 samples alone" in reasons


def test_memory_counts_what_layers_keep(written, capsys):
    words = ("--fix", "pipeline=4,data=1,schedule=gpipe,blocks=1,1,1,3,microbatch_size=4,recompute=none", "--json")
    peaks = [
        json.loads(plan(capsys, "--profile", written(rows), *words)[1])["plans"][0]["peak_bytes"]
        for rows in (ROWS, NOT_KEPT)
    ]
    assert peaks[0][0] - peaks[1][0] == pytest.approx(8 * (6e6 - 2e6))  # eight micro-batches on one layer


def test_a_plan_file_cuts_as_the_search_did(written, capsys, tmp_path):
    file = tmp_path / "plan.json"
    code, text, _ = plan(capsys, "--profile", written(ROWS, samples=4), "--fix", "pipeline=4", "--out", str(file))
    assert code == 0
    assert "samples/s" in text
    assert "MFU" not in text
    made = Plan.load(file)
    assert (made.pipeline, made.batch_size, made.precision) == (4, 32, "fp32")
    assert sum(made.cut) == len(ROWS)


def test_units_of_blocks_have_their_neighbours_and_ties_count_once():
    rows = [("embedding", 1.0, 2.0, 8.0, 40.0, 3.0), *((f"blocks.{n}", 3.0, 6.0, 8.0, 12.0, 20.0) for n in range(2))]
    rows += [("norm", 0.5, 0.5, 8.0, 4.0, 8.0), ("head", 1.0, 1.0, 16.0, 40.0, 8.0)]
    units = units_of(Profile.of(rows, [(40.0, (0, 4))]), 2, 4)
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1"]
    first, last = (unit.rows[2] for unit in units)
    assert (first.forward, first.again, first.kept, first.recomputed) == (4.0, 3.0, 23.0, 3.0 + 8.0)
    assert (last.forward, last.again, last.sent, last.recomputed) == (4.5, 3.0, 16.0, 8.0 + 16.0)
    costs = ProfiledCosts(units=units, cluster=find_cluster("dgx-a100-80", "--cluster"), samples=2)
    request = Request(devices=1, batch_size=2, fixed={"precision": "fp32"}, ends_alone=False)
    one = find_plans(costs, request).plans[0].of
    assert costs.held_parameters(one, [0]) == (40 + 2 * 12 + 4) / 4


def test_a_cut_of_a_graph_sends_all_that_later_layers_read():
    rows = [(name, 1.0, 1.0, size, 0.0) for name, size in (("a", 1.0), ("b", 10.0), ("c", 100.0), ("d", 1000.0))]
    units = units_of(Profile.of(rows, edges=[(0, 1), (0, 3), (1, 2), (2, 3)]), 1, 4)
    assert [unit.rows[1].sent for unit in units] == [1.0, 11.0, 101.0, 1000.0]


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (ROWS, [], 'Add "samples" to the file, or --fix microbatch_size=N.'),
        (ROWS, ["--fix", "microbatch_size=3"], "must be a multiple of the 3 samples of a micro-batch, of which"),
        (ROWS, ["--out", "same.json", "--html", "same.json"], "--html same.json: is the file of --out too"),
        (ROWS, ["--fix", "microbatch_size=4,tensor=2"], "tensor needs times of parts of layers"),
        (NOT_KEPT, ["--fix", "microbatch_size=4,recompute=full"], "recompute needs `kept_bytes` of every layer"),
        (ROWS, ["--fix", "microbatch_size=4,recompute=selective"], "recompute=selective needs times of parts"),
        ([(*row[:1], 0.0, 0.0, *row[3:]) for row in ROWS], [], "no layer takes time"),
        (ROWS, ["--model.layers", "4"], "--model.layers: does not work with --profile"),
        (ROWS, ["--model.config", "gpt3-175b"], "--model.config: does not work with --profile"),
        (ROWS, ["--vocabulary_size", "4"], "--vocabulary_size: does not work with --profile"),
    ],
)
def test_bad_input_is_one_line(written, capsys, rows, words, said):
    code, out, error = plan(capsys, "--profile", written(rows), *words)
    assert (code, out) == (2, "")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"layers": []}', '{"layers": [{"name": "a"}]}'])
def test_a_damaged_file_is_one_line(tmp_path, capsys, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    code, _, error = plan(capsys, "--profile", str(path))
    assert code == 2
    assert error.startswith(f"pipeloom: error: --profile {path}: the profile")
    assert error.count("\n") == 1


def test_values_of_whole_layers_can_be_fixed(written, capsys):
    whole = "tensor=1,context=1,expert=1,slices=1,sequence=false"
    code, text, _ = plan(capsys, "--profile", written(ROWS, samples=4), "--fix", whole)
    assert code == 0
    assert "samples/s" in text


def test_layers_without_memory(written, capsys):
    rows = [(*row[:3], 0.0, 0.0, 0.0) for row in ROWS]
    code, text, _ = plan(capsys, "--profile", written(rows, samples=4), "--objective", "memory")
    assert code == 0
    assert "samples/s" in text
