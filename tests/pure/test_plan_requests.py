"""Plans of random requests pass the runtime's checks, and every value of a plan can be fixed."""

from __future__ import annotations

import json
import random
import re

import pytest

from pipeloom.cli import main
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.request import FIXABLE
from pipeloom.train.config.planned import planned_config
from pipeloom.train.config.train_config import TrainConfig

KEYS = {
    "pipeline", "data", "tensor", "sequence", "context", "expert", "chunks", "schedule", "microbatches",
    "microbatch_size", "slices", "recompute", "data_strategy", "offload", "step_seconds", "bubble_fraction",
    "tokens_per_second", "model_flops_utilization", "peak_bytes", "seconds",
}  # fmt: skip


def words_of(row: dict) -> str:
    """``--fix`` for all values of a plan."""
    values = {key: row[key] for key in FIXABLE if row[key] is not None or key == "offload"}
    return ",".join(f"{key}={_word(value)}" for key, value in values.items())


def _word(value) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_a_long_search_says_what_it_has_found(monkeypatch, capsys):
    monkeypatch.setattr("pipeloom.cli.plan._PROGRESS_SECONDS", 0.0)
    words = ["--model.config", "gpt3-175b", "--cluster", "dgx-a100-80", "--devices", "64", "--batch.size", "8"]
    fixed = "pipeline=8,tensor=8,schedule=1f1b,microbatch_size=1,recompute=full"
    assert main(["plan", *words, "--json", "--fix", fixed]) == 0
    printed = capsys.readouterr()
    best = json.loads(printed.out)["plans"][0]["step_seconds"]
    first, *_, last = printed.err.splitlines()
    assert first.endswith("0 configurations simulated, no plan yet")
    assert re.fullmatch(rf"searching for \d+ s: \d+ configurations? simulated, best time {best:.4g} s", last)


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_requests(seed, tmp_path, capsys):
    rng = random.Random(seed)
    sizes = {"layers": rng.choice([4, 6]), "width": 512, "heads": 8}
    batch, cap = rng.choice([8, 12, 24]), rng.choice(["200MiB", "2GiB"])
    words = [
        *("--cluster", rng.choice(["p3.16xlarge", "dgx-h100"]), "--devices", str(rng.choice([2, 4, 6]))),
        *("--batch.size", str(batch), "--vocabulary_size", "1000", "--memory.cap", cap, "--json"),
        *(word for name, size in sizes.items() for word in (f"--model.{name}", str(size))),
    ]
    assert main(["plan", *words, "--forbid", "slices,context", "--out", str(tmp_path / "plan.json")]) == 0
    answer = json.loads(capsys.readouterr().out)
    best, plan = answer["plans"][0], Plan.load(tmp_path / "plan.json")
    assert best.keys() >= KEYS
    assert {"plans", "refused", "considered", "search_seconds"} <= answer.keys()
    config = planned_config(TrainConfig.from_mapping({"model": sizes, "batch": {"size": batch}}), plan)
    assert config.num_processes == best["devices"] == plan.num_processes
    assert main(["plan", *words, "--fix", words_of(best)]) == 0
    (again,) = json.loads(capsys.readouterr().out)["plans"]
    assert again == best
