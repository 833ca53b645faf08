"""A run that compiles nothing does not load torch._dynamo, and its optimizers take the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.optimizers import make_optimizer
from tests.cpu.train_runs import text, words  # noqa: F401

NAMES = ("adamw", "adam", "sgd", "momentum", "lion", "adafactor", "muon")

PROGRAM = """
import json, sys
from pipeloom.cli import main
assert main(sys.argv[1:]) == 0
from tests.cpu.test_without_dynamo import NAMES, after_steps
found = {name: after_steps(name) for name in NAMES}
print(json.dumps([[name for name in ("torch._dynamo", "sympy") if name in sys.modules], found]))
"""


def after_steps(name: str) -> list[str]:
    """Parameters and state after some steps, and after loading a state."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    config = OptimizerConfig(name=name, momentum=0.9)
    optimizer = make_optimizer(model.named_parameters(), config, hidden_prefixes=("0.",))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        assert not model[0].weight.grad.requires_grad
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]


def test_optimizers_take_the_same_steps_without_dynamo(text: Path, tmp_path: Path) -> None:  # noqa: F811
    command = words(text, tmp_path / "out", "--local", "--steps=2", "--save_steps=1", "--eval_steps=0")
    place = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], env=place, capture_output=True, text=True, timeout=300, check=True
    )
    loaded, found = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    assert found == {name: after_steps(name) for name in NAMES}
