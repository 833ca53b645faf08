"""`pipeloom memory`: tables that add up, choices under a cap, and one line for what is wrong."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.common.quantities import Bytes
from pipeloom.errors import InputError
from pipeloom.plan.memory import KINDS, MemoryRow, write_memory
from pipeloom.plan.plan import Plan
from pipeloom.train.config.memory import under_cap
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.output.directory import to_yaml

# Width 64, 2 blocks a stage of 12 * 64**2 + 2 * 64 parameters, 256 tokens, sequences of 32: one sample a micro-batch.
MODEL = "--model.layers 4 --model.width 64 --model.heads 4 --model.sequence_length 32 --batch.size 8"
BLOCK = 12 * 64**2 + 2 * 64


def memory(capsys, line: str) -> dict:
    assert main(["memory", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_rank_by_kind_in_closed_form(capsys):
    answer = memory(capsys, f"{MODEL} --schedule gpipe --batch.microbatches 8")
    first, last = answer["ranks"]
    count = 256 * 64 + 2 * BLOCK
    assert first["parameters"] == first["gradients"] == 4 * count
    assert first["optimizer"] == 8 * count
    assert last["parameters"] == 4 * (count + 64)  # the last norm
    kept = 16 * 4 * 32 * 64 + 4 * 4 * 32 + 4 * 32 * 4  # of a block: (8 + 2 * 4) e T W + 4 e T + 4 T H
    assert first["activations"] == 8 * (2 * kept + 8 * 32)
    assert last["activations"] == 8 * (2 * kept + (4 * 32 * 64 + 8 * 32) + (4 * 32 * 64 + 4 * 32 * 256 + 8 * 32 + 4))
    # Gradients of mlp_down's output, input and weight; those of logits are 2 * 4 T V.
    assert first["temporary"] == last["temporary"] == 5 * 4 * 32 * 64 + 4 * 4 * 64 * 64 > 2 * 4 * 32 * 256
    # The second backward starts with gradients and without the first micro-batch.
    of_second = sum(first[kind] for kind in KINDS) - 2 * kept - 8 * 32
    of_first = sum(first[kind] for kind in KINDS) - first["gradients"]
    assert first["peak"] == max(of_first, of_second)
    assert answer["total"] == first["peak"] + last["peak"]
    assert answer["largest_rank"] == 1


def test_copies_precision_recomputation_and_optimizers_change_what_they_should(capsys):
    base = memory(capsys, MODEL)["ranks"][0]
    shards = "--parallel.data 2 --parallel.data_strategy zero3"
    for more, kind, factor in (
        ("--memory.recompute full", "activations", (2 * 8192 + 256) / (2 * (16 * 8192 + 1024) + 256)),
        ("--optimizer.name sgd", "optimizer", 0.0),
        ("--optimizer.name momentum", "optimizer", 0.5),
        ("--precision.dtype bf16", "parameters", 0.5),
        (f"{shards} --batch.size 16", "optimizer", 0.5),
        ("--memory.offload cpu", "optimizer", 0.0),
    ):
        found = memory(capsys, f"{MODEL} {more}")["ranks"][0]
        assert found[kind] == pytest.approx(base[kind] * factor, rel=1e-3), more
    away = "--memory.offload cpu --memory.offload_parameters true --parallel.data_bucket_bytes 0"
    alone = memory(capsys, f"{MODEL} {away} --parallel.data_strategy zero3 --parallel.data_granularity microbatch")
    assert [alone["ranks"][0][kind] for kind in ("parameters", "masters", "optimizer")] == [0, 0, 0]
    assert alone["ranks"][0]["gathered"] == 4 * 2 * BLOCK
    halves = memory(capsys, f"{MODEL} {away} {shards} --parallel.data_granularity microbatch --batch.size 16")
    assert halves["ranks"][0]["gathered"] == 4 * 2.5 * BLOCK  # and half of one that is read
    assert memory(capsys, f"{MODEL} {away} --precision.dtype bf16")["ranks"][0]["masters"] == 0
    moved = memory(capsys, f"{MODEL} --parallel.pipeline 4 --memory.offload cpu --memory.offload_activations 3")
    whole = memory(capsys, f"{MODEL} --parallel.pipeline 4")
    assert moved["ranks"][0]["activations"] * 4 == whole["ranks"][0]["activations"] * 3


def test_optimizers_side_by_side_by_formula_and_as_held(capsys):
    def rows(line: str) -> dict[str, dict]:
        return {
            row["optimizer"]: row
            for row in memory(capsys, f"{MODEL} --optimizers --vocabulary_size 64 {line}")["optimizers"]
        }

    for strategy, degree in (("zero1", 4), ("zero3", 2)):
        found = rows(f"--parallel.data {degree} --parallel.data_strategy {strategy} --precision.dtype bf16")
        kept = 2 if strategy == "zero1" else 0
        for name, numbers in (("sgd", 0), ("momentum", 1), ("lion", 1), ("adamw", 2)):
            formula = {
                "parameters": kept,
                "masters": 4 / degree,
                "gradients": 4 / degree,
                "optimizer": 4 * numbers / degree,
            }
            assert found[name]["formula"] == formula
            assert found[name]["held"] == pytest.approx(formula, rel=1e-3), "but for padding"
        assert found["adamw-8bit"]["formula"]["optimizer"] * degree == pytest.approx(2 * (1 + 4 / 2048), rel=2e-3)
        assert [name for name, row in found.items() if row["note"]] == ["adamw-8bit"]
        for name, row in found.items():  # by a step of the optimizer itself
            measured = row["measured_state_bytes"]
            assert measured == (None if name == "adamw-8bit" else pytest.approx(4 * row["state_numbers"], rel=1e-12))
    shared = rows("--parallel.tensor 2")
    assert [name for name, row in shared.items() if not row["trained"]] == ["adafactor", "adamw-8bit"]
    assert "parallel.tensor=2" in shared["adafactor"]["note"]
    (row,) = {row["state_numbers"] for row in (rows("")["adafactor"], rows("--parallel.pipeline 4")["adafactor"])}
    matrices = 4 * sum(r + c for r, c in ((192, 64), (64, 64), (256, 64), (64, 256))) + 2 * (64 + 64)  # head, embedding
    vectors = 9 * 64
    total = 4 * BLOCK + 2 * 64 * 64 + 64
    assert row == pytest.approx((matrices + vectors) / total), "row and column sums of matrices, vectors in full"
    assert main(["memory", *MODEL.split(), "--optimizers", "--vocabulary_size", "64"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["optimizer", "keeps", "parameters"]
    assert shown[-1].startswith("adamw-8bit: formula alone, listed only: `pipeloom train` does not offer it; ")


def test_a_cap_chooses_the_options_that_keep_it(capsys):
    line = f"{MODEL} --schedule bfs --batch.size 32 --parallel.data 4 --parallel.data_strategy zero3"
    peaks = {}
    for granularity in ("step", "chunk", "microbatch"):
        ranks = memory(capsys, f"{line} --parallel.data_granularity {granularity}")["ranks"]
        peaks[granularity] = max(rank["peak"] for rank in ranks)
    assert peaks["microbatch"] < peaks["step"]
    cap = math.floor(peaks["step"]) - 1
    answer = memory(capsys, f"{line} --memory.cap {cap}")
    assert answer["chosen"]["data_granularity"] in ("chunk", "microbatch")
    assert answer["chosen"]["recompute"] == "none"
    assert max(rank["peak"] for rank in answer["ranks"]) <= cap
    alone = max(r["peak"] for r in memory(capsys, MODEL)["ranks"])
    assert main(["memory", *MODEL.split(), "--memory.cap", f"{alone / 2**20 * 0.9:.3f}MiB"]) == 0
    printed = capsys.readouterr().out
    assert "under the cap with --memory.recompute " in printed
    words = printed.splitlines()[-1].partition("with ")[2]
    assert max(r["peak"] for r in memory(capsys, f"{MODEL} {words}")["ranks"]) <= alone * 0.9
    assert main(["memory", *MODEL.split(), "--memory.cap", "1KiB"]) == 2
    assert "cap=1024 bytes (1 KiB): rank 0 needs at least" in capsys.readouterr().err


def test_a_cap_weighs_the_program_that_runs():
    """Whatever the strategy: with the sum over the stages that hold the tied matrix."""
    words = f"{MODEL} --model.tie_embeddings --parallel.data 2 --memory.cap 1GB --parallel.data_strategy"
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        _, choice = under_cap(parse([*words.split(), strategy]), 256)
        assert choice.program.gradient_groups == ((0, 1),), strategy


def test_sizes_are_read_and_written_with_their_units(tmp_path, capsys):
    for given, number, written in (
        ("1536", 1536, 1536),
        ("8e9", 8 * 10**9, 8 * 10**9),
        ("1.5GiB", 3 << 29, "1536MiB"),
        ("16 gb", 16 * 10**9, 16 * 10**9),
        ("2T", 2 * 10**12, 2 * 10**12),
        ("1536KiB", 3 << 19, "1536KiB"),
        ("0", 0, 0),
        (26214400, 25 << 20, "25MiB"),
        (2e6, 2 * 10**6, 2 * 10**6),
        ("9007199254740993", 2**53 + 1, 2**53 + 1),
    ):
        size = Bytes.parse(given)
        assert (int(size), size.written, Bytes.parse(str(size))) == (number, written, size)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({"memory": {"cap": given}, "parallel": {"data_bucket_bytes": given}}))
        words = ["--parallel.data_bucket_bytes", str(given), "--memory.cap", str(given)]
        config = parse(["--config", str(file)])
        assert config == parse(words)
        assert config.memory.cap == config.parallel.data_bucket_bytes == number
        assert config.data_parallel.bucket_bytes == number
        file.write_text(to_yaml(config))
        assert parse(["--config", str(file)]) == config == TrainConfig.from_mapping(yaml.safe_load(to_yaml(config)))
    for wrong in ("lots", "-1", "0.5", "1e-3", "1.5.GiB", "1XB", "1e999", "nan", True, None):
        with pytest.raises(InputError, match="Use a form such as 8e9, 16GB or 16GiB"):
            Bytes.parse(wrong)
    with pytest.raises(SystemExit):
        parse(
            ["--parallel.data", "2", "--parallel.data_bucket_bytes", "4MiB", "--memory.cap", "1GiB", "--print_config"]
        )
    printed = capsys.readouterr().out
    assert "  data_bucket_bytes: 4MiB\n" in printed
    assert "  cap: 1GiB\n" in printed


def test_the_table_has_what_is_there_and_the_largest_rank(capsys):
    assert main(["memory", *MODEL.split(), "--parallel.data", "2", "--parallel.data_strategy", "parameter-server"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["parameters", "gradients", "optimizer", "activations", "temporary", "buffers"]
    assert [line[:17] for line in lines[1:5]] == [f"rank {rank}, replica {copy}" for copy in (0, 1) for rank in (0, 1)]
    assert lines[5].startswith("all ranks, 2 data-parallel replicas: ")
    assert "largest: rank 0, replica 0 with " in lines[5]


def test_a_run_shows_predicted_beside_measured(capsys, tmp_path):
    row = MemoryRow(
        process=0,
        replica=0,
        rank=0,
        predicted={"parameters": 1024.0, "activations": 2048.0, "peak": 3072.0},
        measured={"parameters": 1024.0, "activations": 1024.0, "peak": None},
    )
    write_memory(tmp_path, [row])
    assert main(["memory", "--run", str(tmp_path)]) == 0
    first, predicted, measured = capsys.readouterr().out.splitlines()
    assert first.split() == ["parameters", "activations", "peak"]
    assert predicted.split()[-7:] == ["predicted", "1", "KiB", "2", "KiB", "3", "KiB"]
    assert measured.split() == ["measured", "1", "KiB", "1", "KiB", "-"]
    assert main(["memory", "--run", str(tmp_path / "none")]) == 2
    assert (
        "has no memory.json: `pipeloom train` writes it after its second step and when it ends. Pass"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--memory.cap lots", "memory.cap=lots: must be a size in bytes, such as"),
        ("--parallel.data_bucket_bytes 1MB/s", "parallel.data_bucket_bytes=1MB/s: must be a size in bytes, such as"),
        ("--costs x.json", "--costs works only with --memory.cap"),
        ("--vocabulary_size 0", "--vocabulary_size=0: must be at least 1"),
        ("--parallel.data -1", "give a number"),
        ("--parallel.cut time", "parallel.cut=time: the measured times are unknown before a run"),
        ("--model.width 63", "model width=63 is not a multiple of heads=6. Use heads=7"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["memory", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_configuration_is_written_as_a_plan_that_takes_the_same_memory(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    for line in (
        "--memory.cap 7.5MiB --parallel.cut 1,3",
        "--schedule bfs --batch.size 32 --parallel.data 4 --parallel.data_strategy zero3 --memory.cap 5MiB",
        "--schedule seq1f1b --parallel.slices 20,12 --precision.dtype bf16 --memory.recompute full,none",
        "--schedule pipedream --parallel.replicas 2,1 --steps 4 --eval_steps 2 --save_steps 2 --batch.size 4",
        "--memory.offload cpu --memory.offload_activations 2 --parallel.data_strategy zero3 "
        "--memory.offload_parameters true --parallel.data_bucket_bytes 1MiB",
    ):
        answer = memory(capsys, f"{MODEL} {line} --out {path}")
        assert memory(capsys, f"{MODEL} {line}") == answer
        plan = Plan.load(path)
        assert list(plan.predicted_memory_bytes) == [rank["peak"] for rank in answer["ranks"]]
        model = MODEL.partition(" --batch.size")[0]
        drains = "--steps 4 --eval_steps 2 --save_steps 2"
        assert memory(capsys, f"{model} {drains} --plan {path}")["ranks"] == answer["ranks"], line
    assert main(["memory", *MODEL.split(), "--memory.cap", "8MiB", "--out", path]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"wrote {path}; run it: pipeloom train --plan {path} --model.layers 4 --model.width 64 ")
    first, second = Plan.load(path).why
    assert first == "Of the options that keep 8MiB per rank, --memory.recompute none is the fastest."
    assert "optimizer adamw" in second


def test_times_of_a_costs_file_are_the_predicted_step(capsys, tmp_path):
    path, costs = tmp_path / "plan.json", tmp_path / "costs.json"
    stage = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}
    costs.write_text(json.dumps({"stages": [stage] * 2}))
    line = f"{MODEL} --memory.cap 8MiB --costs {costs}"
    answer = memory(capsys, f"{line} --out {path}")
    assert Plan.load(path).predicted_step_seconds == answer["chosen"]["step_seconds"]


def test_degrees_that_a_run_chooses_are_unknown(capsys):
    assert main(["memory", "--parallel", "auto"]) == 2
    assert "--parallel auto: the degrees are unknown before a run" in capsys.readouterr().err
