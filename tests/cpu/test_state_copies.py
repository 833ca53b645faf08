"""Copies of a process's state in memory: they come back bitwise, and one of two is whole at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.cli import main
from pipeloom.train import checkpoint
from pipeloom.train.recovery.state_copies import StateCopies


@pytest.fixture
def memories() -> Iterator[list[int]]:
    found = [os.memfd_create("test") for _ in range(2)]
    yield found
    for descriptor in found:
        os.close(descriptor)


class Run:
    """A model that trains alone, with dropout."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Dropout(0.5), nn.Linear(5, 1).double())
        self.model[2].bias.requires_grad_(False)  # no optimizer state
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}

    def step(self) -> float:
        loss = self.model(torch.ones(3, 5, dtype=torch.float64)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def contents(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": checkpoint.optimizer_state(self.optimizer, self.names),
            "random": checkpoint.random_state(),
            "state": {"sampler": 3},
            "layout": {"ranks": 1},
        }


def test_a_copy_comes_back_in_another_process(memories: list[int]) -> None:
    torch.manual_seed(1)
    run, copies = Run(), StateCopies(memories)
    assert copies.steps == []
    assert copies.first_step is None
    copies.write(0, run.contents())  # the optimizer has no state yet
    copies.begin(0)
    copies.begin(2)  # does not begin again
    losses = []
    for step in range(1, 5):
        losses.append(run.step())
        if step in (2, 3):
            copies.write(step, run.contents())
    found = StateCopies([os.dup(memory) for memory in memories])
    assert (found.steps, found.first_step) == ([2, 3], 0)
    other, copy = Run(), found.read(2)
    other.step()  # has state that is replaced
    copy.load_model(other.model.state_dict())
    copy.load_optimizer(other.optimizer, other.names)
    checkpoint.restore_random_state(copy.random(0, 1))
    assert (copy.state, copy.layout) == ({"sampler": 3}, {"ranks": 1})
    assert [other.step(), other.step()] == losses[2:]
    found.drop_after(2)
    assert copies.steps == [2]


def test_a_copy_that_is_cut_short_leaves_the_other(memories: list[int]) -> None:
    run, copies = Run(), StateCopies(memories)
    copies.write(1, run.contents())
    copies.write(2, run.contents())

    torn = run.contents()
    torn["model"] = {**torn["model"], "last": torch.empty(1, device="meta")}  # which cannot be copied
    with pytest.raises(NotImplementedError):
        copies.write(3, torn)
    assert StateCopies(memories).steps == [2]
    copies.write(3, run.contents())
    assert StateCopies(memories).steps == [2, 3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--recover", "--local"), "recover=true: with --local, one process holds all ranks"),
        (("--recover", "--parallel.cut=time"), "recover=true: parallel.cut=time is measured again"),
        (("--recover", "--spare=1"), "spare=1: must be 0. All ranks are forked from one process"),
        (("--copy_steps=3",), "copy_steps=3: has no effect without --recover"),
    ],
)
def test_runs_that_cannot_recover_are_refused(
    more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"--output_dir={tmp_path}", *more]) == 2
    assert message in capsys.readouterr().err


def test_launchers_that_start_no_rank_again_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--recover"]) == 2
    assert "recover=true: only pipeloom's own launcher and torchrun start ranks again." in capsys.readouterr().err
