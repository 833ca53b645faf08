"""Paths of outputs are checked before the work whose result is written there."""

import pytest

from pipeloom.cli import main

PLAN = ("plan", "--model.layers", "4", "--cluster", "dgx-a100-80", "--devices", "2", "--batch.size", "8")
SLICE = ("slice", "--batch", "2", "--ranks", "2", "--sequence", "64", "--costs", "costs.json")
COMMANDS = [
    (PLAN, "plan.find_plans", "--out"),
    (PLAN, "plan.find_plans", "--html"),
    (("simulate", "1f1b", "--ranks", "2", "--microbatches", "4"), "simulate._simulate", "--svg"),
    (("simulate", "1f1b", "--ranks", "2", "--microbatches", "4"), "simulate._simulate", "--out"),
    (("partition", "--profile", "profile.json", "--ranks", "2"), "partition._profile", "--out"),
    (("partition", "--profile", "profile.json", "--ranks", "2"), "partition._profile", "--write-profile"),
    (SLICE, "slice._costs", "--out"),
    (SLICE, "slice._costs", "--write-costs"),
    (("memory", "--vocabulary_size", "256"), "memory._times", "--out"),
]


@pytest.mark.parametrize("name", ["none/file", ".", "read/file"])
@pytest.mark.parametrize(("words", "work", "option"), COMMANDS)
def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    words, work, option, name, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read").write_text("")
    monkeypatch.setattr(f"pipeloom.cli.{work}", None)
    assert main([*words, option, name]) == 2
    assert f"{option} {name}: " in capsys.readouterr().err
