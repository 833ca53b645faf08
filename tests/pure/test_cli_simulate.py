"""`pipeloom simulate`, `schedules` and `report` as scripts and people call them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from pipeloom.cli import main
from pipeloom.plan.plan import Plan
from pipeloom.schedules import FAMILIES

KEYS = [
    "schedule",
    "ranks",
    "microbatches",
    "chunks",
    "slices",
    "makespan_seconds",
    "span_seconds",
    "ideal_seconds",
    "bubble_fraction",
    "bubble_fraction_span",
    "peak_activations",
    "period_seconds",
    "ideal_period_seconds",
    "weight_versions",
]


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_numbers_as_json(capsys):
    code, out, err = run(capsys, "simulate", "1f1b", "--ranks", "4", "--microbatches", "8", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert list(answer) == KEYS
    assert answer == {
        "schedule": "1f1b",
        "ranks": 4,
        "microbatches": 8,
        "chunks": 1,
        "slices": 1,
        "makespan_seconds": 33.0,
        "span_seconds": 33.0,
        "ideal_seconds": 24.0,
        "bubble_fraction": pytest.approx(3 / 11),
        "bubble_fraction_span": pytest.approx(3 / 11),
        "peak_activations": [4, 3, 2, 1],
        "period_seconds": 33 / 8,
        "ideal_period_seconds": 3.0,
        "weight_versions": [1, 1, 1, 1],
    }


def test_times_are_those_of_one_ranks_share(capsys):
    times = ["--forward", "0.5", "--backward-input", "0.25", "--backward-weight", "1.25", "--latency", "0.125"]
    code, out, _ = run(capsys, "simulate", "naive", "--ranks", "3", "--microbatches", "2", *times, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["ideal_seconds"] == 2 * 2.0
    assert answer["makespan_seconds"] == 2 * (3 * 2.0 + 4 * 0.125)


def test_the_picture_and_the_table(capsys):
    code, out, err = run(capsys, "simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--backward-weight", "0")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["rank 0  F0 F1       B0 B1", "rank 1     F0 F1 B0 B1"]
    assert "bubble 33.33 %" in out
    assert "peak live activations" in out


def test_files_are_written(capsys, tmp_path):
    names = {"--html": "a.html", "--svg": "a.svg", "--trace": "a.json.gz"}
    words = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    code, out, _ = run(capsys, "simulate", "1f1b", "--ranks", "2", "--microbatches", "3", *words, "--json")
    assert code == 0
    assert list(json.loads(out)) == KEYS
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["traceEvents"]
    _, out, _ = run(capsys, "simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--svg", words[3])
    assert f"wrote {words[3]}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1f1", "--ranks", "2", "--microbatches", "2"], "Did you mean '1f1b'?"),
        (["1f1b", "--ranks", "0", "--microbatches", "2"], "0 ranks"),
        (["1f1b", "--ranks", "2", "--microbatches", "0"], "0 micro-batches"),
        (["1f1b", "--ranks", "2", "--microbatches", "-2"], "-2 micro-batches"),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--chunks", "3"], "Use 1 chunk"),
        (["1f1b", "--ranks", "two", "--microbatches", "2"], "ranks"),
        (["1f1b", "--ranks", "2.5", "--microbatches", "2"], "ranks"),
        (["1f1b", "--ranks", "2"], "microbatches"),
        (["--ranks", "2", "--microbatches", "2"], "name"),
        (
            ["1f1b", "--ranks", "2", "--microbatches", "2", "--forward", "-1"],
            "forward=-1.0: must be a number of seconds from 0",
        ),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--backward-input", "nan"], "nan"),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--backward-weight", "inf"], "inf"),
        (
            ["1f1b", "--ranks", "2", "--microbatches", "2", "--latency", "-0.5"],
            "latency_seconds=-0.5: must be a number of seconds from 0",
        ),
        (["1f1b", "--ranks", "100000", "--microbatches", "100000"], "Use smaller sizes"),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--svg", "no/such/place.svg"], "--svg no/such/place.svg"),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--html", "."], "--html ."),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--trace", "no/such/t.json"], "--trace no/such/t.json"),
        (["1f1b", "--rank", "2", "--microbatches", "2"], "--ranks"),
        (["1f1b", "--ranks", "2", "--microbatches", "2", "--microbatch", "3"], "did you mean --microbatches?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "simulate", *words)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_schedules(capsys):
    code, out, _ = run(capsys, "schedules", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["name"] for row in rows] == list(FAMILIES)
    assert set(rows[0]) == {"name", "paper", "constraints", "bubble", "peak"}
    code, out, _ = run(capsys, "schedules")
    assert code == 0
    for name in FAMILIES:
        assert name in out


@pytest.mark.parametrize("command", ["simulate", "schedules", "report"])
def test_help_has_examples(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"pipeloom {command}" in out


def test_a_report_is_made_again(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code, out, _ = run(capsys, "report", str(tmp_path))
    assert (code, out) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").exists()
    code, out, err = run(capsys, "report", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_the_command_runs_as_a_process_without_a_terminal():
    done = subprocess.run(
        [sys.executable, "-m", "pipeloom", "simulate", "1f1b", "--ranks", "2", "--microbatches", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TERM": "dumb"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rank 0  F0 F1")
    assert "\x1b" not in done.stdout


# --- copies of the pipeline and moved activations ---------------------------------------------------------------------


def simulated(line: str) -> int:
    return main(["simulate", *line.split()])


def test_copies_and_moves_are_simulated(capsys):
    words = "bfs --ranks 2 --microbatches 4 --data 4 --data-strategy zero3 --data-granularity chunk "
    words += "--data-bandwidth 1 --parameter-bytes 4"
    assert simulated(f"{words} --json") == 0
    answer = json.loads(capsys.readouterr().out)
    # 2 bytes a stage, of which each copy gets 3 / 4 from others: 1.5 s for each of 3 gathers and 2 reductions of a rank
    assert answer["data"] == {"degree": 4, "strategy": "zero3", "granularity": "chunk"}
    assert answer["data_link_seconds"] == [7.5, 7.5]
    assert answer["makespan_seconds"] == 13.5 + 1.5 + 1.5  # the first gather and the last reduction are in nobody's way
    assert simulated(words) == 0
    assert "bfs: 4 replicas, zero3, granularity chunk\n" in capsys.readouterr().out
    assert simulated("1f1b --ranks 4 --microbatches 8 --offload 3 --activation-bytes 1 --json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_activations"] == answer["peak_bytes"] == [3.0, 3.0, 2.0, 1.0]
    assert "memory_link_seconds" not in answer  # without a limit it takes no time


def test_sizes_and_bandwidths_take_units(capsys):
    words = "1f1b --ranks 2 --microbatches 4 --data 2 --offload 2 --json"
    answers = []
    for sizes in (
        "--parameter-bytes 2097152 --activation-bytes 3000 --data-bandwidth 5e5 --memory-bandwidth 0.5",
        "--parameter-bytes 2MiB --activation-bytes 3kB --data-bandwidth 500KB/s --memory-bandwidth 5e-1",
    ):
        assert simulated(f"{words} {sizes}") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-strategy zero3", "--data-strategy has no effect without --data"),
        ("--memory-bandwidth 1", "--memory-bandwidth has no effect without --offload"),
        ("--data 0", "--data 0: must be at least 1"),
        ("--data 2 --data-granularity chunk", "granularity='chunk': strategy 'ddp' gathers"),
        ("--data 2 --data-bandwidth 1", "no parameter_bytes"),
        ("--parameter-bytes -1", "--parameter-bytes=-1: must be a size in bytes, such as"),
        ("--activation-bytes 1XB", "--activation-bytes=1XB: must be a size in bytes, such as 8e9, 16GB or 16GiB."),
        (
            "--data 2 --data-bandwidth fast",
            "--data-bandwidth=fast: must be a bandwidth in bytes per second, such as 1.25e9, 12GB",
        ),
        ("--offload 0", "--offload 0: must be more than 0"),
        ("--offload 1", "needs 3. Raise the cap"),
    ],
)
def test_copies_and_moves_that_cannot_be_are_refused(words, said, capsys):
    assert simulated(f"1f1b --ranks 4 --microbatches 8 {words}") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_simulated_schedule_is_written_as_a_plan(tmp_path, capsys):
    path, costs = tmp_path / "plan.json", tmp_path / "costs.json"
    stage = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "activation_bytes": 8}
    costs.write_text(json.dumps({"stages": [stage, {**stage, "forward": 2.0}]}))
    words = ["--ranks", "2", "--microbatches", "4", "--json"]
    search = ["simulate", "search", *words, "--effort", "0.01", "--costs", str(costs)]
    assert main(search) == 0
    plain = capsys.readouterr().out
    assert main([*search, "--out", str(path)]) == 0
    assert capsys.readouterr().out == plain
    answer, plan = json.loads(plain), Plan.load(path)
    assert plan.make_schedule().name == "search"
    assert (plan.pipeline, plan.microbatches, plan.virtual_stages) == (2, 4, 1)
    assert plan.predicted_step_seconds == answer["makespan_seconds"]
    assert list(plan.predicted_memory_bytes) == answer["peak_bytes"]
    assert any("The fastest named schedule" in reason for reason in plan.why)
    assert main(["simulate", str(path), *words, "--costs", str(costs)]) == 0  # the orders of the plan
    assert json.loads(capsys.readouterr().out)["makespan_seconds"] == answer["makespan_seconds"]
    shared = ["--data", "2", "--data-strategy", "zero3", "--data-granularity", "chunk"]
    assert main(["simulate", "bfs", *words, *shared, "--out", str(path)]) == 0
    plan = Plan.load(path)
    assert (plan.schedule, plan.virtual_stages, plan.predicted_step_seconds) == ("bfs", 2, None)
    assert (plan.data, plan.data_strategy, plan.data_granularity) == (2, "zero3", "chunk")
    capsys.readouterr()
    for line, said in (
        ("pipedream", "is a stream. `pipeloom partition --out` plans streams."),
        ("1f1b --offload 3", "--offload has no offload target"),
        ("compare 1f1b gpipe", "write one schedule"),
    ):
        path.unlink(missing_ok=True)
        assert main(["simulate", *line.split(), *words, "--out", str(path)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
        assert not path.exists()
