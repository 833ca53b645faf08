"""Checkpoints of experts: saved with any (ep, tp, data strategy), loaded with any other, optimizer states included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.cli import checkpoint as cli
from pipeloom.parallel.placed import cut_blocks
from pipeloom.processes.exchange import Exchange
from pipeloom.train import checkpoint as ck
from pipeloom.train.checkpoint.convert import model_tensors
from tests.cpu.expert_model import EXPERTS, INNER, WIDTH, build, on_mesh, own_batch, pipeline

# Each loads what the one before saved: the degrees of its mesh, and its data strategy.
CHAIN: list[tuple[dict[str, int], Any]] = [
    ({"pp": 2, "dp": 2, "ep": 2}, "ddp"),
    ({}, None),
    ({"pp": 2, "dp": 2, "tp": 2}, "zero1"),
    ({"pp": 1, "dp": 4, "ep": 4, "tp": 2}, "ddp"),
    ({"pp": 2, "dp": 4, "ep": 2}, "zero3"),
    ({"pp": 1, "dp": 2, "ep": 2, "tp": 2}, "zero2"),
    ({"pp": 2, "dp": 4, "ep": 2}, "parameter-server"),
    ({"pp": 2, "dp": 4, "ep": 4}, pl.DataParallel("zero3", granularity="microbatch", bucket_bytes=0)),
    ({"pp": 2, "dp": 4, "ep": 2}, pl.DataParallel("zero1", layout="parameters")),
]


class MeshExchange(Exchange):
    """Between the processes of a mesh."""

    def __init__(self, mesh: pl.Mesh) -> None:
        self.rank, self.size, self._members = mesh.members.rank, mesh.members.size, mesh.members

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._members.gather(payload)


def start(pipe: pl.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.02)


def train(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> float:
    (update,) = pl.BarrierStep(pipe, optimizer, max_norm=0.3).step(*own_batch(pipe.mesh, step))
    return float(update.loss)


def names_of(pipe: pl.Pipeline) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in pipe.named_parameters()}


def save(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, directory: Path, step: int) -> None:
    ck.save(
        directory,
        step,
        model=pipe.state.main_state(),
        optimizer=ck.optimizer_state(optimizer, names_of(pipe)),
        ranges=pipe.state.ranges,
        blocks=cut_blocks(pipe.named_parameters()),
        exchange=None if pipe.mesh is None else MeshExchange(pipe.mesh),
    )


def load(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, path: Path) -> None:
    checkpoint, blocks = ck.load(path), cut_blocks(pipe.named_parameters())
    checkpoint.load_model(pipe.state.main_state(), pipe.state.ranges, blocks=blocks)
    pipe.state.refresh()
    checkpoint.load_optimizer(optimizer, names_of(pipe), pipe.state.ranges, blocks=blocks)


def content(path: Path) -> dict[str, Tensor]:
    """All of a checkpoint, as one process loads it: parameters and optimizer states."""
    with pipeline(ranks=1, stages=2) as pipe:
        optimizer = start(pipe)
        load(pipe, optimizer, path)
        found = {name: value.clone() for name, value in pipe.state_dict().items()}
        states = {f"{names_of(pipe)[p]}/{key}": v for p, state in optimizer.state.items() for key, v in state.items()}
        assert len(states) == 3 * len(found)
        return found | states


def on_ranks(degrees: dict[str, int], work: Any) -> Any:
    return on_mesh(work, **degrees)[-1] if degrees else work(None)


def test_a_chain_of_layouts_keeps_every_bit_and_trains_as_one_run(tmp_path: Path) -> None:
    with pipeline(ranks=1, stages=2) as pipe:
        optimizer = start(pipe)
        wanted = [train(pipe, optimizer, step) for step in range(len(CHAIN))]
    losses: list[float] = []
    for step, (degrees, data) in enumerate(CHAIN):

        def work(mesh: pl.Mesh | None, step: int = step, data: Any = data) -> float:
            ranks = 1 if mesh is None else mesh.degree("pp")
            with pipeline(mesh, ranks=ranks, stages=2, data=data) as pipe:
                optimizer = start(pipe)
                if step:
                    load(pipe, optimizer, tmp_path / f"checkpoint-{step}")
                    save(pipe, optimizer, tmp_path / "copy", step)
                loss = train(pipe, optimizer, step)
                save(pipe, optimizer, tmp_path, step + 1)
                return loss

        losses.append(on_ranks(degrees, work))
        ck.verify(tmp_path / f"checkpoint-{step + 1}")
        if step:
            original, copied = (content(each / f"checkpoint-{step}") for each in (tmp_path, tmp_path / "copy"))
            assert original.keys() == copied.keys()
            assert all(torch.equal(value, copied[name]) for name, value in original.items()), (degrees, data)
    assert losses == pytest.approx(wanted, rel=1e-12)


def test_inspect_and_convert_know_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(mesh: pl.Mesh) -> None:
        with pipeline(mesh, data="zero3") as pipe:
            optimizer = start(pipe)
            train(pipe, optimizer, 0)
            save(pipe, optimizer, tmp_path, 1)

    on_mesh(work, pp=2, dp=4, ep=2)
    path = tmp_path / "checkpoint-1"
    assert cli.main(["verify", str(path)]) == 0
    assert cli.main(["ls", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.partition("\n")[2])
    shapes = {row["name"]: row["shape"] for row in answer["tensors"]}
    assert shapes["1.up"] == [EXPERTS, INNER, WIDTH]
    wanted = content(path)
    for name, tensor in model_tensors(path).items():
        assert bytes(tensor.source.read()) == wanted[name].numpy().tobytes()
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert {name: tuple(v.shape) for name, v in build().state_dict().items()} == {
        name: tuple(shape) for name, shape in shapes.items()
    }
