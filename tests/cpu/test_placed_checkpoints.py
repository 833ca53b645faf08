"""Checkpoints of parameters in blocks: saved by any layout, loaded by any other, with optimizer states, bitwise."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.cli import checkpoint as cli
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.parallel.placed import Cut, Place, Placed, Section, cut_blocks, even, place_parameter
from pipeloom.processes.exchange import Exchange
from pipeloom.train import checkpoint as ck
from pipeloom.train.checkpoint.boxes import Box, boxes_of, cover_box
from pipeloom.train.checkpoint.convert import model_tensors
from tests.cpu.pairwise import in_turn
from tests.cpu.placed_model import on_mesh, own_batch, pipeline
from tests.cpu.test_checkpoint import on_threads, rewrite_manifest
from tests.cpu.thread_exchange import ThreadExchange

# A table of words, a fused weight, a cube and a vector, as a model that is not cut has them.
SHAPES = {"table": (7, 4), "fused": (12, 5), "cube": (4, 6, 3), "gain": (5,), "bias": (6,)}


def one_dimensional(tp: int) -> tuple[dict[str, int], dict[str, Placed]]:
    axes = ("tp",)
    heads = (Section(6, min(tp, 2)), Section(6, 1))
    return {"tp": tp}, {
        "table": Placed((7, 4), {0: even(7, tp, axes)}, padded={0: -(-7 // tp)}),
        "fused": Placed((12, 5), {0: Cut(axes, heads)}, sum_over=axes),
        "cube": Placed((4, 6, 3), {1: even(6, tp, axes)}),
        "gain": Placed((5,), sum_over=axes),
    }


def two_dimensional() -> tuple[dict[str, int], dict[str, Placed]]:
    row, column = ("tp_row",), ("tp_column",)
    return {"tp_row": 2, "tp_column": 2}, {
        "table": Placed((7, 4), {0: even(7, 2, row), 1: even(4, 2, column)}, padded={0: 4}),
        "fused": Placed((12, 5), {0: Cut(row, (Section(6, 2), Section(6, 2))), 1: even(5, 2, column)}, padded={1: 3}),
        "cube": Placed((4, 6, 3), {0: even(4, 2, row), 1: even(6, 2, column)}),
        "bias": Placed((6,), {0: even(6, 2, column)}, sum_over=row),
    }


def three_dimensional() -> tuple[dict[str, int], dict[str, Placed]]:
    return {"tp_i": 2, "tp_j": 2, "tp_k": 2}, {
        "table": Placed((7, 4), {1: even(4, 4, ("tp_k", "tp_i"))}),
        "fused": Placed((12, 5), {0: even(12, 4, ("tp_i", "tp_j"))}),
        "cube": Placed((4, 6, 3), {0: even(4, 2, ("tp_k",)), 1: even(6, 2, ("tp_i",))}),
        "bias": Placed((6,), {0: even(6, 2, ("tp_j",))}),
    }


class Process:
    """One process of a layout: its block of every parameter, or the shard of it of one of `copies` replicas."""

    def __init__(self, layout: tuple[dict[str, int], dict[str, Placed]], number: int, copies: int, shards: str) -> None:
        degrees, how = layout
        replica, member = divmod(number, prod(degrees.values()))
        coordinates = {}
        for axis, degree in reversed(degrees.items()):
            member, coordinates[axis] = divmod(member, degree)
        self.place = Place(coordinates, degrees)
        self.model: dict[str, nn.Parameter] = {}
        self.ranges: dict[str, Range] = {}
        locals_ = {name: how[name].local_shape(self.place) if name in how else shape for name, shape in SHAPES.items()}
        segment, position = -(-sum(map(prod, locals_.values())) // copies), 0
        for name, shape in locals_.items():
            size = prod(shape)
            if shards == "elements":
                start, stop = (min(max(replica * segment + at - position, 0), size) for at in (0, segment))
                self.ranges[name] = Range(start, stop, shape)
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            if name in how:
                place_parameter(parameter, how[name], self.place)
            if name in self.ranges:
                start, stop, _ = self.ranges[name]
                shard = nn.Parameter(parameter.detach().reshape(-1)[start:stop].clone())
                vars(shard).update(vars(parameter))
                parameter = shard
            self.model[name] = parameter
            position += size
        self.blocks = cut_blocks(self.model.items())
        self.optimizer = torch.optim.AdamW(self.model.values())

    @property
    def names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.items()}

    def part_of(self, name: str, full: Tensor) -> Tensor:
        block = self.blocks.get(name)
        local = full if block is None else block.cut(full)
        span = self.ranges.get(name)
        return local.clone() if span is None else local.reshape(-1)[span.start : span.stop].clone()

    def fill(self, values: dict[str, dict[str, Tensor]]) -> None:
        """The optimizer makes its states; then values by name and key."""
        for parameter in self.model.values():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        for name, parameter in self.model.items():
            parameter.data.copy_(self.part_of(name, values["model"][name]))
            for key in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][key].copy_(self.part_of(name, values[key][name]))
            if not parameter.numel():
                self.optimizer.state.pop(parameter)

    def save(self, directory: Path, exchange: ThreadExchange | None) -> None:
        ck.save(
            directory,
            1,
            model={name: parameter.detach() for name, parameter in self.model.items()},
            optimizer=ck.optimizer_state(self.optimizer, self.names),
            ranges=self.ranges,
            blocks=self.blocks,
            exchange=exchange,
        )

    def check_loaded(self, directory: Path, values: dict[str, dict[str, Tensor]]) -> None:
        checkpoint = ck.load(directory)
        model = {name: parameter.detach() for name, parameter in self.model.items()}
        checkpoint.load_model(model, self.ranges, blocks=self.blocks, all_names=SHAPES)
        checkpoint.load_optimizer(self.optimizer, self.names, self.ranges, blocks=self.blocks)
        for name, parameter in self.model.items():
            assert torch.equal(parameter.detach(), self.part_of(name, values["model"][name])), name
            if parameter.numel():
                state = self.optimizer.state[parameter]
                assert float(state["step"]) == 1.0
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(state[key], self.part_of(name, values[key][name])), (name, key)


LAYOUTS = {
    "one": ({"tp": 1}, {}),
    "tp2": one_dimensional(2),
    "tp4": one_dimensional(4),
    "2d": two_dimensional(),
    "3d": three_dimensional(),
}


def random_values() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return {
        kind: {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }


def save_by(layout: str, copies: int, shards: str, directory: Path, values: dict[str, dict[str, Tensor]]) -> None:
    size = prod(LAYOUTS[layout][0].values()) * copies

    def work(exchange: ThreadExchange) -> None:
        process = Process(LAYOUTS[layout], exchange.rank, copies, shards)
        process.fill(values)
        process.save(directory, exchange)

    assert on_threads(work, size) == [None] * size


@pytest.mark.parametrize(
    ("layout", "replicas"), in_turn(LAYOUTS, [(1, "whole"), (2, "whole"), (3, "elements")]), ids=str
)
def test_any_layout_saves_and_every_layout_loads(layout: str, replicas: tuple[int, str], tmp_path: Path) -> None:
    values = random_values()
    save_by(layout, *replicas, tmp_path, values)
    path = tmp_path / "checkpoint-1"
    ck.verify(path)
    stored = {key: tensor for file in path.glob("model-*") for key, tensor in safetensors.torch.load_file(file).items()}
    assert sum(map(torch.numel, stored.values())) == sum(map(prod, SHAPES.values()))  # each element once
    assert json.loads((path / "manifest.json").read_text())["version"] == (2 if layout == "one" else 3)
    for name, tensor in model_tensors(path).items():
        assert bytes(tensor.source.read()) == values["model"][name].numpy().tobytes()
    for other, (others, other_shards) in product(LAYOUTS, ((1, "whole"), (2, "elements"))):
        for number in range(prod(LAYOUTS[other][0].values()) * others):
            Process(LAYOUTS[other], number, others, other_shards).check_loaded(tmp_path, values)


def test_the_command_knows_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = random_values()
    save_by("2d", 1, "whole", tmp_path, values)
    path = tmp_path / "checkpoint-1"
    assert cli.main(["verify", str(path)]) == 0
    assert cli.main(["ls", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.partition("\n")[2])
    (cube,) = (row for row in answer["tensors"] if row["name"] == "cube")
    assert cube["shape"] == [4, 6, 3]
    assert sorted(piece[1:] for piece in cube["pieces"]) == [
        [[0, 0, 0], [2, 3, 3]],
        [[0, 3, 0], [2, 6, 3]],
        [[2, 0, 0], [4, 3, 3]],
        [[2, 3, 0], [4, 6, 3]],
    ]
    assert cli.main(["ls", str(path)]) == 0
    assert "and 3 more" in capsys.readouterr().out
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 0
    exported = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == SHAPES.keys()
    assert all(torch.equal(exported[name], values["model"][name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda box: [[0, 0, 0], [2, 4, 3], box[2]], "missing or duplicated"),
        (lambda box: [[0, 0, 0], [2, 7, 3], box[2]], "not a valid manifest"),
        (lambda box: [[0, 0], [2, 3], [4, 6]], "missing or duplicated"),
        (lambda box: [[0, 3, 0], [2, 3, 3], box[2]], "not a valid manifest"),
        (lambda box: [[0, 0, 0], [1, 3, 3], box[2]], "missing or duplicated"),
        (lambda box: "all", "not a valid manifest"),
    ],
)
def test_forged_blocks_are_refused(tmp_path: Path, change: object, message: str) -> None:
    save_by("2d", 1, "whole", tmp_path, random_values())
    path = tmp_path / "checkpoint-1"
    forged = 0

    def forge(data: dict[str, object]) -> None:
        nonlocal forged
        for part in data["parts"]:
            rows = part["blocks"].get("cube", [])
            if rows and rows[0][:2] == [[0, 0, 0], [2, 3, 3]]:
                new = change(rows[0])
                rows[0] = new
                forged += 1

    rewrite_manifest(path, forge)
    assert forged == 1
    with pytest.raises(CheckpointError, match=message) as caught:
        model_tensors(path, verify_files=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        Process(LAYOUTS["one"], 0, 1, "whole").check_loaded(tmp_path, random_values())


def test_blocks_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    """A rank is missing, or holds the block of another; nothing is left behind."""
    degrees, how = LAYOUTS["tp2"]

    def work(exchange: ThreadExchange) -> None:
        process = Process((degrees, how), 0, 1, "whole")
        process.fill(random_values())
        process.save(tmp_path, exchange)

    (error,) = on_threads(work, 1)
    assert isinstance(error, CheckpointError)
    assert "the blocks of table (7, 4) on all ranks do not hold each element once" in str(error)
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_ranges_in_boxes(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).view(shape)
    boxes = list(boxes_of(Range(start, stop, tuple(shape))))
    found = [number for box in boxes for number in numbers[box.slices_in()].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_that_overlap_or_leave_a_hole_do_not_cover() -> None:
    full, left, right = Box.full((2, 4)), Box((0, 0), (2, 2), (2, 4)), Box((0, 2), (2, 4), (2, 4))
    assert [what for what, _, _ in cover_box("w", [(right, "b"), (left, "a")], full)] == ["a", "b"]
    for boxes in (
        [left],
        [left, left],
        [left, right, Box((1, 1), (2, 2), (2, 4))],
        [left, Box((0, 1), (2, 3), (2, 4))],
    ):
        with pytest.raises(CheckpointError, match=r"elements of w in \[0:2,0:4\] are missing or duplicated"):
            cover_box("w", [(box, "x") for box in boxes], full)


def test_runs_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    """pp2 x tp2 with zero1 -> one process -> pp2 x tp2 x dp2 -> one process: losses of an unbroken run."""

    def start(pipe: pl.Pipeline) -> torch.optim.Optimizer:
        return torch.optim.AdamW(pipe.parameters(), lr=0.02)

    def train(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        stepper = pl.BarrierStep(pipe, optimizer, max_norm=0.5)
        return [float(u.loss) for step in (first, first + 1) for u in stepper.step(*own_batch(pipe, step))]

    def save(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, step: int, exchange: object = None) -> None:
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        ck.save(
            tmp_path,
            step,
            model=pipe.state.main_state(),
            optimizer=ck.optimizer_state(optimizer, names),
            ranges=pipe.state.ranges,
            blocks=cut_blocks(pipe.named_parameters()),
            exchange=exchange,
        )

    def load(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer) -> None:
        checkpoint, blocks = ck.load(tmp_path), cut_blocks(pipe.named_parameters())
        checkpoint.load_model(pipe.state.main_state(), pipe.state.ranges, blocks=blocks)
        pipe.state.refresh()
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        checkpoint.load_optimizer(optimizer, names, pipe.state.ranges, blocks=blocks)

    class MeshExchange(Exchange):
        def __init__(self, mesh: pl.Mesh) -> None:
            self.rank, self.size, self._members = mesh.members.rank, mesh.members.size, mesh.members

        def all_gather(self, payload: bytes) -> list[bytes]:
            return self._members.gather(payload)

    with pipeline() as pipe:
        optimizer = start(pipe)
        wanted = [loss for first in (0, 2, 4, 6) for loss in train(pipe, optimizer, first)]
    losses: list[float] = []

    def on_ranks(first: int, **options: str) -> object:
        def work(mesh: pl.Mesh) -> list[float]:
            with pipeline(mesh, **options) as pipe:
                optimizer = start(pipe)
                if first:
                    load(pipe, optimizer)
                found = train(pipe, optimizer, first)
                save(pipe, optimizer, first + 2, MeshExchange(mesh))
                return found

        return work

    def alone(first: int) -> list[float]:
        with pipeline() as pipe:
            optimizer = start(pipe)
            load(pipe, optimizer)
            found = train(pipe, optimizer, first)
            save(pipe, optimizer, first + 2)
            return found

    losses += on_mesh(on_ranks(0, data="zero1"), pp=2, tp=2, dp=2)[0]
    losses += alone(2)
    losses += on_mesh(on_ranks(4, data="zero3"), pp=2, tp=2, dp=2)[3]
    losses += alone(6)
    assert torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-10)
