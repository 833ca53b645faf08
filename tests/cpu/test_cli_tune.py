"""`pipeloom tune` as scripts and people call it."""

from __future__ import annotations

import json
import re

import pytest

from pipeloom.cli import main

BUILD = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(6, 4)

def alone():
    return nn.Linear(4, 4)

def narrow():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 2)), torch.ones(6, 4)

def absent():
    return nn.Sequential(nn.Linear(4)), torch.ones(6, 4)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    return name


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["tune", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_curve_of_an_own_model(capsys, own, tmp_path):
    words = ["--chunks", "1,2,3", "--module", f"{own}:build", "--balance", "2,1", "--rounds", "2", "--svg", "a.svg"]
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert re.search(r"^     1  \d+\.\d \(\d+\.\d to \d+\.\d\) +#+$", out, re.MULTILINE)
    assert re.search(r"^fastest: chunks=[123], .* per step$", out, re.MULTILINE)
    picture = (tmp_path / "a.svg").read_text()
    assert picture.count("<circle") == 3


def test_a_gpt_as_json(capsys):
    words = [
        "--chunks",
        "--model.layers",
        "1",
        "--model.width",
        "8",
        "--model.heads",
        "1",
        "--model.sequence_length",
        "4",
    ]
    code, out, _ = run(capsys, *words, "--batch", "4", "--rounds", "1", "--json", "--checkpoint", "always")
    assert code == 0
    found = json.loads(out)
    assert [each["chunks"] for each in found["times"]] == [1, 2, 4]
    assert found["chunks"] in (1, 2, 4)


def test_errors_are_one_line(capsys, own):
    for words, text in (
        (["--chunks", "1,x"], "--chunks=1,x: must be integers"),
        (["--chunks", "4", "--module", f"{own}:build"], "a batch of 6 does not split into 4 micro-batches"),
        (["--module", own], "must be MODULE:FUNCTION"),
        (["--module", f"{own}:nothing"], "nothing"),
        (["--module", f"{own}:alone"], "must be model and batch"),
        (["--module", f"{own}:build", "--model.layers", "1"], "does not work with --model.layers"),
        (["--chunks", "2", "--module", f"{own}:build", "--devices", "cuda:7,cuda:8"], "'cuda:7' does not exist"),
        (["--rounds", "0", "--module", f"{own}:build"], "at least one round"),
        (["--batch", "-1", "--module", f"{own}:build"], "--batch=-1: must be at least 1"),
    ):
        code, _, err = run(capsys, *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert text in err
    for function, text in (
        ("narrow", r"a step raised RuntimeError: .* \(in "),
        ("absent", r"--module=\w+:absent: the function raised TypeError"),
    ):
        code, _, err = run(capsys, "--chunks", "2", "--module", f"{own}:{function}")
        assert (code, err.count("\n")) == (1, 1), err
        assert re.search(text, err)
