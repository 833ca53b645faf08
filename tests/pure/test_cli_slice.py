"""`pipeloom slice` as scripts and people call it, with a costs file."""

from __future__ import annotations

import json
import warnings

import pytest

from pipeloom.cli import main
from pipeloom.plan.plan import Plan
from pipeloom.plan.slicing.scheduled_slices import peak_along
from pipeloom.schedules import seq1f1b

COSTS = {
    "forward": {"base": [[8, 0.006], [128, 0.006], [2048, 0.08]], "context": [0, 0, 1e-7, 1e-8]},
    "backward": {"base": [[8, 0.012], [128, 0.012], [2048, 0.16]], "context": [0, 0, 2e-7, 2e-8]},
    "latency": 0.0002,
    "seconds_per_token_sent": 1e-6,
}


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return str(path)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["slice", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_numbers_as_json(capsys, costs):
    words = ["--sequence", "2048", "--ranks", "4", "--batch", "1", "--grid", "32", "--costs", costs, "--json"]
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert list(answer) == ["slices", "batch", "predicted_seconds", "unsliced_seconds", "max_slice_seconds"]
    [lengths] = answer["slices"]
    assert sum(lengths) == 2048
    assert answer["batch"] == [1]
    assert answer["unsliced_seconds"] == pytest.approx(4 * (0.24 + 2 * (0.0002 + 0.002048)))
    longest = total = context = 0
    for length in lengths:
        base = 0.006 + max(0, length - 128) / 1920 * 0.074
        time = 3 * (base + context * (1e-7 + 1e-8 * length)) + 2 * (0.0002 + 1e-6 * length)
        longest, total, context = max(longest, time), total + time, context + length
    assert answer["max_slice_seconds"] == pytest.approx(longest)
    assert answer["predicted_seconds"] == pytest.approx(total + 3 * longest)


def test_pieces_of_a_batch_and_a_memory_limit(capsys, costs):
    words = ["--sequence", "512", "--ranks", "4", "--batch", "5", "--costs", costs, "--json"]
    free, tight = (json.loads(run(capsys, *words, *more)[1]) for more in ([], ["--memory-limit", "800"]))
    for answer in (free, tight):
        assert sum(answer["batch"]) == 5
        assert len(answer["slices"]) == len(answer["batch"])
        assert all(sum(lengths) == 512 for lengths in answer["slices"])
    assert set(tight["batch"]) == {1}
    early = seq1f1b(num_ranks=4, num_microbatches=5, num_slices=len(tight["slices"][0]))
    assert peak_along(early, tight["slices"][0]) <= 800
    assert tight["predicted_seconds"] >= free["predicted_seconds"]
    assert free["unsliced_seconds"] >= free["predicted_seconds"]


def test_a_memory_limit_is_that_of_the_schedule_that_runs(capsys, costs):
    words = ["--sequence", "512", "--ranks", "4", "--batch", "3", "--costs", costs]
    assert "x in seq1f1b; " in run(capsys, *words, "--memory-limit", "700")[1]
    for more in ([], ["--memory-limit", "1536"], ["--memory-limit", "1536", "--schedule", "terapipe"]):
        out = run(capsys, *words, *more)[1]
        assert "x in terapipe; " in out
        assert "at most 1,536 tokens per rank\n" in out
    code, _, err = run(capsys, *words, "--memory-limit", "1535", "--schedule", "terapipe")
    assert code == 2
    assert "holds all 1536 tokens" in err
    finest = json.loads(run(capsys, *words, "--memory-limit", "536", "--json")[1])
    assert {*finest["slices"][0]} == {8}  # beyond the counts that are tried anyway


def test_sequences_shorter_than_the_usual_grid(capsys, costs):
    code, out, _ = run(capsys, "--sequence", "5", "--ranks", "2", "--batch", "2", "--costs", costs, "--json")
    assert code == 0
    assert {tuple(lengths) for lengths in json.loads(out)["slices"]} == {(5,)}


def test_slices_of_another_schedule_are_simulated(capsys, costs):
    words = ["--sequence", "1024", "--ranks", "4", "--batch", "4", "--grid", "32", "--costs", costs]
    other = ["--schedule", "seq1f1b", "--memory-limit", "2000"]
    first, early = (json.loads(run(capsys, *words, "--json", *more)[1]) for more in ([], other))
    assert list(early) == list(first)
    assert len({*early["batch"]}) == len({tuple(lengths) for lengths in early["slices"]}) == 1
    assert first["predicted_seconds"] * 0.999 <= early["predicted_seconds"] < early["unsliced_seconds"]
    code, out, _ = run(capsys, *words, "--schedule", "seq1f1b")
    assert code == 0
    assert " tokens per rank\n" in out
    assert "\nsliced\nrank 0  " in out


def test_the_picture(capsys, costs):
    code, out, _ = run(capsys, "--sequence", "2048", "--ranks", "2", "--batch", "2", "--grid", "256", "--costs", costs)
    assert code == 0
    assert "unsliced\nrank 0  " in out
    assert "\nsliced\nrank 0  " in out
    assert " x 1 sequence: slices " in out
    assert " with slices, " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks=0: must be at least 1"),
        (["--sequence", "0"], "sequence=0: must be at least 1"),
        (["--batch", "-1"], "batch=-1: must be at least 1"),
        (["--grid", "0"], "grid=0: must be at least 1"),
        (["--grid", "257"], "grid=257: must be at most the sequence, 256 tokens"),
        (["--memory-limit", "255"], "Raise memory_limit to 280"),
        (["--ranks", "two"], "ranks"),
        (["--costs", "no/such/file"], "no/such/file"),
        (["--costs", "."], "--costs ."),
        (["--model.layers", "8"], "--model.layers: does not work with --costs"),
        (["--write-costs", "x"], "--write-costs: does not work with --costs"),
        (["--gird", "8"], "did you mean --grid?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, costs, words, message):
    code, out, err = run(capsys, "--sequence", "256", "--ranks", "4", "--batch", "2", "--costs", costs, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_bad_costs_file_names_its_key(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**COSTS, "latency": "soon"}))
    code, _, err = run(capsys, "--sequence", "256", "--ranks", "4", "--batch", "2", "--costs", str(path))
    assert code == 2
    assert "latency" in err
    assert len(err.splitlines()) == 1


def test_ranks_beyond_the_blocks_are_refused_before_anything_is_measured(capsys):
    code, _, err = run(capsys, "--sequence", "64", "--ranks", "3", "--batch", "1", "--model.layers", "2")
    assert code == 2
    assert "num_ranks=3: the model has 2 blocks" in err


def test_costs_that_overflow_are_refused_in_one_line(capsys, tmp_path):
    steep = {"base": [[1e-300, 0], [2e-300, 1e100]]}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": steep, "backward": steep}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, _, err = run(capsys, "--sequence", "256", "--ranks", "4", "--batch", "2", "--costs", str(path))
    assert code == 2
    assert len(err.splitlines()) == 1


def test_the_slices_are_written_as_a_plan(capsys, costs, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--sequence", "1024", "--ranks", "4", "--batch", "4", "--grid", "32", "--costs", costs]
    for schedule in ("terapipe", "seq1f1b"):
        plain = run(capsys, *words, "--schedule", schedule, "--json")[1]
        assert run(capsys, *words, "--schedule", schedule, "--json", "--out", str(path)) == (0, plain, "")
        answer, plan = json.loads(plain), Plan.load(path)
        assert (plan.schedule, plan.pipeline, plan.microbatches) == (schedule, 4, len(answer["batch"]))
        assert (plan.slices, plan.batch_size) == (tuple(answer["slices"][0]), 4)
        assert plan.predicted_step_seconds == answer["predicted_seconds"]
        assert "with slices" in plan.why[0]
    out = run(capsys, *words, "--out", str(path))[1]
    assert out.endswith(f"wrote {path}; run it: pipeloom train --plan {path} --model.sequence_length 1024\n")


def test_a_plan_cuts_all_micro_batches_alike(capsys, tmp_path):
    path, costs = tmp_path / "plan.json", tmp_path / "costs.json"
    rows = {"base": [[8, 1], [16, 1.5], [64, 4], [256, 20]]}
    costs.write_text(json.dumps({"forward": rows, "backward": rows}))
    words = ["--sequence", "32", "--ranks", "4", "--batch", "7", "--grid", "8", "--costs", str(costs)]
    answer = json.loads(run(capsys, *words, "--json", "--out", str(path))[1])
    assert len(set(map(tuple, answer["slices"]))) > 1
    plan = Plan.load(path)
    assert 7 % plan.microbatches == 0
    assert plan.predicted_step_seconds >= answer["predicted_seconds"]
    assert "different cuts would take" in plan.why[1]


def test_a_plan_that_cannot_be_written_is_one_line(capsys, costs, tmp_path):
    words = ["--sequence", "64", "--ranks", "2", "--batch", "1", "--costs", costs]
    code, out, err = run(capsys, *words, "--out", str(tmp_path / "none" / "plan.json"))
    assert (code, out) == (2, "")
    assert "--out" in err
    assert len(err.splitlines()) == 1
