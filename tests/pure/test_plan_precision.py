"""Number formats as an axis of `pipeloom plan`, where the user gives several."""

from __future__ import annotations

import json

import pytest

from pipeloom.cli import main
from pipeloom.plan.search.best_first import Answer, find_plans
from pipeloom.plan.search.request import Request, parse_fixed
from tests.pure.published_runs import cost_model, gpt

FIXED = "context=1,slices=1,tensor=1,sequence=false,schedule=1f1b"
WORDS = "plan --model.layers 4 --model.width 1024 --model.heads 16 --vocabulary_size 100 --cluster dgx-h100 --devices 2"


def search(fixed: str = FIXED, precisions=(), memory=80 * 2.0**30, **more) -> Answer:
    costs = cost_model(gpt(4, 1024, 16, sequence=256, vocabulary=8000), "dgx-a100-80", "pipeloom")
    request = Request(
        devices=2, batch_size=8, memory_bytes=memory, fixed=parse_fixed(fixed), precisions=precisions, top=1, **more
    )
    return find_plans(costs, request)


def test_the_fastest_format_wins_and_the_first_of_equal_ones():
    alone = {name: search(f"{FIXED},precision={name}").plans[0].step_seconds for name in ("fp32", "bf16", "fp16")}
    assert alone["bf16"] == alone["fp16"] < alone["fp32"]
    for names in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")):
        found = search(precisions=names).plans[0]
        assert found.of.precision.dtype == "bf16"
        assert found.step_seconds == alone["bf16"]
    assert search().plans[0].of.precision.dtype == "bf16"


def test_what_fits_in_one_format_alone():
    fixed = f"{FIXED},data=2,data_strategy=ddp,microbatch_size=1"
    peaks = {
        name: search(f"{fixed},precision={name}", objective="memory", forbidden=frozenset({"offload"})).plans[0].peak
        for name in ("fp32", "bf16")
    }
    assert peaks["fp32"] < peaks["bf16"]  # without main parameters beside
    found = search(fixed, ("bf16", "fp32"), sum(peaks.values()) / 2).plans[0]
    assert found.of.precision.dtype == "fp32"


def test_the_command(capsys):
    assert main([*WORDS.split(), "--batch.size", "8", "--precision", "fp32,bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--precision bf16,fp8", "--precision=bf16,fp8: 'fp8' must be one of fp32, bf16, fp16."),
        ("--precision bf16,bf16", "--precision=bf16,bf16: bf16 is duplicated. Remove one."),
        ("--precision bf16 --fix precision=fp32", "--precision=bf16: precision is in --fix too."),
    ],
)
def test_bad_input_is_one_line(capsys, words, said):
    assert main([*WORDS.split(), "--batch.size", "8", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
