"""A run whose predicted peak is just under a cap of memory trains within it; just over it, the run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.plan.memory import read_memory
from tests.cpu.train_runs import WORDS, metrics, words

SIZES = (
    "--model.layers=8", "--model.width=512", "--model.heads=8", "--model.sequence_length=512", "--batch.size=8",
    "--batch.microbatches=2", "--steps=4", "--save_steps=4", "--eval_steps=4", "--eval_batches=1", "--local",
)  # fmt: skip


def test_a_cap_decides_whether_a_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", [tmp_path / name for name in ("full", "under", "over")]
    text.mkdir()
    (text / "words.txt").write_text("".join(f"{WORDS[number * 7 % 13]} " for number in range(60_000)))
    assert main(words(text, out[0], *SIZES, "--memory.recompute=full")) == 0
    (least,) = (row.predicted["peak"] for row in read_memory(out[0]))

    cap = least / 0.99  # the prediction is 1 % under it
    assert main(words(text, out[1], *SIZES, f"--memory.cap={cap}")) == 0
    (predicted,) = (row.predicted["peak"] for row in read_memory(out[1]))
    peak = metrics(out[1])[-1]["peak_memory_bytes"][0]
    print(f"cap {cap:.0f} bytes, predicted {predicted:.0f}, allocated at most {peak}")
    assert peak <= cap
    assert peak == pytest.approx(predicted, rel=0.02)

    capsys.readouterr()
    assert main(words(text, out[2], *SIZES, f"--memory.cap={least / 1.03}")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out[2].exists()
