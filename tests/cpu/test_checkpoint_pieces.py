"""Checkpoints move between layouts: parameters whole or in parts, on any number of ranks, to the last bit."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeloom.cli import checkpoint as cli
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train import checkpoint as ck
from tests.cpu.test_checkpoint import flip, on_threads, rewrite_manifest, same_bits

SHAPES = [(5, 3), (3,), (2, 3, 4), (), (1, 7), (1,), (4, 1), (13,)]
NAMES = [f"layers.{number}.weight" for number in range(len(SHAPES))]
STRATEGIES = ("copies", "server", "elements", "parameters")


@dataclass(frozen=True)
class Layout:
    """Names of each pipeline rank, times copies that share them by a strategy."""

    names: tuple[tuple[str, ...], ...]
    copies: int
    strategy: str
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.names) * self.copies

    def ranges(self, rank: int) -> dict[str, Range]:
        """What a process has of its parameters, where that is not all; process = copy * pipeline ranks + its rank."""
        copy, stage = divmod(rank, len(self.names))
        names = self.names[stage]
        shapes = {name: SHAPES[NAMES.index(name)] for name in names}
        if self.strategy == "copies":
            return {}
        if self.strategy == "elements":  # one behind the other, padded, in equal segments
            segment = -(-sum(map(math.prod, shapes.values())) // self.copies)
            ranges, position = {}, 0
            for name, shape in shapes.items():
                bounds = [min(max(copy * segment + at - position, 0), math.prod(shape)) for at in (0, segment)]
                ranges[name] = Range(*bounds, shape)
                position += math.prod(shape)
            return ranges
        owners = random.Random(self.seed)
        owner = {name: 0 if self.strategy == "server" else owners.randrange(self.copies) for name in NAMES}
        return {name: Range(0, 0, shape) for name, shape in shapes.items() if owner[name] != copy}


@dataclass
class Process:
    """What one process of a layout holds."""

    model: dict[str, nn.Parameter]
    ranges: dict[str, Range]
    optimizer: torch.optim.Optimizer = field(init=False)

    @property
    def names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.items()}


def part_of(tensor: Tensor, part: Range | None) -> Tensor:
    return tensor.clone() if part is None else tensor.reshape(-1)[part.start : part.stop].clone()


def processes(layout: Layout, values: dict[str, Tensor], make: Any) -> Iterator[Process]:
    """All processes, with these values and without states."""
    for rank in range(layout.size):
        ranges = layout.ranges(rank)
        names = layout.names[rank % len(layout.names)]
        model = {name: nn.Parameter(part_of(values[name], ranges.get(name))) for name in names}
        process = Process(model, ranges)
        process.optimizer = make([{"params": list(model.values())}])  # which may be none
        yield process


def states_of(kind: str, name: str) -> dict[str, Tensor]:
    """The whole state of a parameter, as the optimizer has it after a step."""
    generator = torch.Generator().manual_seed(NAMES.index(name))
    shape = SHAPES[NAMES.index(name)]
    keys = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[kind]
    state = {key: torch.randn(shape, generator=generator) for key in keys}
    return state | ({"step": torch.tensor(float(7 + NAMES.index(name)))} if kind == "adamw" else {})


def set_states(process: Process, kind: str) -> None:
    for name, parameter in process.model.items():
        part = process.ranges.get(name)
        process.optimizer.state[parameter] = {
            key: tensor.clone() if key == "step" else part_of(tensor, part)
            for key, tensor in states_of(kind, name).items()
        }


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def save(directory: Path, step: int, held: list[Process], **more: Any) -> list[Any]:
    """What each rank's save answers or raises."""

    def work(exchange: Any) -> Path:
        process = held[exchange.rank]
        return ck.save(
            directory,
            step,
            model=process.model,
            optimizer=ck.optimizer_state(process.optimizer, process.names),
            ranges=process.ranges,
            exchange=exchange,
            **more,
        )

    return on_threads(work, len(held))


def load(path: Path, process: Process) -> None:
    opened = ck.load(path)
    opened.load_model(process.model, process.ranges)
    opened.load_optimizer(process.optimizer, process.names, process.ranges)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any cut of the names over up to three ranks, some names on two of them, over up to three copies."""
    num_ranks = draw(st.integers(1, 3))
    homes = [draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)) for _ in NAMES]
    strategy = draw(st.sampled_from(STRATEGIES))
    if strategy == "elements":  # what several ranks hold is laid out alike: by itself, which this layout does not know
        homes = [{min(home)} for home in homes]
    names = tuple(tuple(n for n, home in zip(NAMES, homes, strict=True) if rank in home) for rank in range(num_ranks))
    return Layout(names, draw(st.integers(1, 3)), strategy, draw(st.integers(0, 99)))


@settings(max_examples=25, deadline=None)
@given(first=layouts(), second=layouts(), kind=st.sampled_from(sorted(MAKERS)), data=st.randoms())
def test_any_layout_loads_into_any_other_to_the_last_bit(
    first: Layout, second: Layout, kind: str, data: random.Random
) -> None:
    generator = torch.Generator().manual_seed(data.randrange(2**30))
    values = {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, SHAPES, strict=True)}
    with tempfile.TemporaryDirectory() as directory:
        held = list(processes(first, values, MAKERS[kind]))
        for process in held:
            set_states(process, kind)
        (path,) = set(save(Path(directory), 1, held))
        written = [len(safetensors.torch.load_file(file)) for file in path.glob("model-*.safetensors")]
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(map(math.prod, SHAPES)), "each element once"
        assert sum(written) == len(index["weight_map"])
        blank = {name: torch.zeros(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
        again = list(processes(second, blank, MAKERS[kind]))
        for process in again:
            load(path, process)
            for name, parameter in process.model.items():
                part = process.ranges.get(name)
                assert same_bits(parameter, part_of(values[name], part)), name
                state = process.optimizer.state.get(parameter, {})
                expected = states_of(kind, name) if parameter.numel() else {}
                assert state.keys() == expected.keys()
                for key, tensor in state.items():
                    assert same_bits(tensor, expected[key] if key == "step" else part_of(expected[key], part)), key
        (back,) = set(save(Path(directory), 2, again))
        opened = ck.load(back)
        assert all(same_bits(opened.tensor(name), values[name]) for name in NAMES)
        out = Path(directory) / "export"
        cli.convert(back, out)
        exported = safetensors.torch.load_file(out / "model.safetensors")
        assert exported.keys() == values.keys()
        assert all(same_bits(exported[name], values[name]) for name in NAMES)


# --- refusals ---------------------------------------------------------------------------------------------------------

Parts = list[tuple[int, int]]


def save_parts(directory: Path, parts: Parts, **more: Any) -> list[Any]:
    """Rank r saves elements parts[r] of "w", 0 ... 11 as (3, 4), with the momentum of SGD, which is 100 more."""
    held = []
    for start, stop in parts:
        held.append(
            Process({"w": nn.Parameter(torch.arange(float(start), float(stop)))}, {"w": Range(start, stop, (3, 4))})
        )
        held[-1].optimizer = MAKERS["sgd"]([held[-1].model["w"]])
        held[-1].optimizer.state[held[-1].model["w"]] = {"momentum_buffer": held[-1].model["w"].detach() + 100}
    for change in more.pop("changes", ()):
        change(held)
    return save(directory, 1, held, **more)


def refused(answers: list[Any]) -> str:
    assert {type(answer) for answer in answers} == {CheckpointError}
    (text,) = {str(answer) for answer in answers}
    assert "\n" not in text
    return text


def without_state(held: list[Process]) -> None:
    held[1].optimizer.state.clear()


def of_another_shape(held: list[Process]) -> None:
    held[1].ranges["w"] = Range(5, 12, (4, 3))


def whole(held: list[Process]) -> None:
    held[0] = Process({"w": nn.Parameter(torch.zeros(3, 4))}, {})
    held[0].optimizer = MAKERS["sgd"](list(held[0].model.values()))


@pytest.mark.parametrize(
    ("parts", "changes", "words"),
    [
        ([(0, 5), (6, 12)], [], "elements 5 to 6 of w (3, 4) are on no rank"),
        ([(1, 5), (5, 12)], [], "elements 0 to 1 of w (3, 4) are on no rank"),
        ([(0, 5), (5, 9), (12, 12)], [], "elements 9 to 12 of w (3, 4) are on no rank"),
        ([(0, 0), (12, 12)], [], "elements 0 to 12 of w (3, 4) are on no rank"),
        ([(0, 5), (3, 12)], [], "elements 3 to 5 of w (3, 4) are in different ranges on ranks 0 and 1"),
        ([(0, 12), (5, 12)], [], "elements 5 to 12 of w (3, 4) are in different ranges on ranks 0 and 1"),
        ([(0, 5), (5, 12)], [whole], "elements 5 to 12 of w (3, 4) are in different ranges on ranks 0 and 1"),
        ([(0, 5), (5, 13)], [], "the range of w (3, 4) on rank 1 ends at 13: the tensor has 12 elements"),
        ([(0, 5), (5, 12)], [of_another_shape], "w has shape (4, 3) on rank 1 and (3, 4) on another"),
        (
            [(0, 5), (5, 12)],
            [without_state],
            "rank 0 has optimizer state 'momentum_buffer' for its shard of w, but rank 1 has none",
        ),
        (
            [(0, 5), (5, 12)],
            [lambda held: held[1].ranges.update(w=Range(5, 11, (3, 4)))],
            "rank 1: w has 7 elements, but its range 5 to 11 has 6",
        ),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused_on_all_ranks(
    parts: Parts, changes: list[Any], words: str, tmp_path: Path
) -> None:
    (path,) = set(save_parts(tmp_path, [(0, 5), (5, 12)]))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert words in refused(save_parts(tmp_path, parts, changes=changes))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_same_parts_on_several_ranks_are_written_by_the_lowest(tmp_path: Path) -> None:
    """As tied parameters are, which two pipeline ranks have, each with the same copies."""
    (path,) = set(save_parts(tmp_path, [(5, 12), (0, 5), (0, 5), (5, 12), (12, 12)]))
    assert [sorted(safetensors.torch.load_file(file)) for file in sorted(path.glob("model-*.safetensors"))] == [
        ["w[5:12]"],
        ["w[0:5]"],
        [],
        [],
        [],
    ]
    assert torch.equal(ck.load(path).tensor("w"), torch.arange(12.0).reshape(3, 4))


def target(start: int, stop: int, shape: tuple[int, ...] = (3, 4)) -> tuple[dict[str, Tensor], dict[str, Range]]:
    return {"w": torch.zeros(stop - start)}, {"w": Range(start, stop, shape)}


def test_only_files_that_are_needed_are_read(tmp_path: Path) -> None:
    (path,) = set(save_parts(tmp_path, [(0, 3), (3, 6), (6, 9), (9, 12)]))
    for number in (1, 4):
        (path / f"model-{number:05d}-of-00004.safetensors").unlink()
    tensors, ranges = target(4, 8)
    ck.load(path).load_model(tensors, ranges)
    assert tensors["w"].tolist() == [4, 5, 6, 7]
    tensors, ranges = target(4, 10)
    with pytest.raises(CheckpointError, match=r"model-00004-of-00004\.safetensors cannot be read"):
        ck.load(path).load_model(tensors, ranges)
    flip(path / "model-00002-of-00004.safetensors", -1, 3)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004\.safetensors is damaged"):
        ck.load(path).load_model(*target(4, 8))


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    (path,) = set(save_parts(tmp_path, [(0, 5), (5, 12)], compute_type="bf16"))
    opened = ck.load(path)
    assert opened.compute_type == "bf16"
    for tensors, ranges, words in (
        (*target(4, 8, (4, 3)), r"w has shape \(3, 4\) in .* and \(4, 3\) in the model"),
        ({"w": torch.zeros(4).bfloat16()}, {"w": Range(4, 8, (3, 4))}, "w has type F32 .* and BF16"),
        ({"w": torch.zeros(5)}, {"w": Range(4, 8, (3, 4))}, "w has 5 elements, but its range 4 to 8 has 4"),
        ({"w": torch.zeros(3, 5)}, {}, r"w has shape \(3, 4\) .* and \(3, 5\)"),
    ):
        good = torch.zeros(3, 4)
        with pytest.raises(CheckpointError, match=words):
            opened.load_model({"w": good, **tensors}, ranges)
        assert not good.any()
    rewrite_manifest(path, lambda data: data["parts"][1]["pieces"].update(w=[6, 12, [3, 4]]))
    for read in (lambda: ck.load(path).tensor("w"), lambda: cli.main(["verify", str(path)])):
        with pytest.raises(CheckpointError, match=r"elements of w.* from 5 are missing or duplicated"):
            read()


def test_sums_of_rows_belong_to_whole_matrices(tmp_path: Path) -> None:
    """Adafactor's state of a matrix cannot be cut; between layouts that keep parameters whole it moves."""
    weights = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    optimizer = torch.optim.Adafactor([weights[0]])
    weights[0].grad = torch.randn(3, 4)
    optimizer.step()
    before = {key: tensor.clone() for key, tensor in optimizer.state[weights[0]].items()}
    names = {weights[0]: "w", weights[1]: "w"}
    empty = nn.Parameter(torch.zeros(0))

    def work(exchange: Any) -> Path:
        mine = exchange.rank == 1
        state = ck.optimizer_state(optimizer if mine else torch.optim.Adafactor([empty]), {**names, empty: "w"})
        held = (weights[0], {}) if mine else (empty, {"w": Range(0, 0, (3, 4))})
        return ck.save(tmp_path, 1, model={"w": held[0]}, optimizer=state, ranges=held[1], exchange=exchange)

    (path,) = set(on_threads(work, 2))
    other = torch.optim.Adafactor([weights[1]])
    ck.load(path).load_optimizer(other, names)
    after = other.state[weights[1]]
    assert after.keys() == before.keys() == {"step", "row_var", "col_var"}
    assert all(same_bits(after[key], before[key]) for key in before)
    part = nn.Parameter(torch.zeros(5))
    with pytest.raises(CheckpointError, match=r"'row_var' of w has shape \(3, 1\) .* full parameter \(3, 4\)"):
        ck.load(path).load_optimizer(torch.optim.Adafactor([part]), {part: "w"}, {"w": Range(0, 5, (3, 4))})
    flat = torch.optim.Adafactor([nn.Parameter(torch.zeros(12))])
    flat.state[flat.param_groups[0]["params"][0]] = {"step": torch.tensor(1.0), "variance": torch.zeros(12)}
    one = flat.param_groups[0]["params"][0]
    state, ranges = ck.optimizer_state(flat, {one: "w"}), {"w": Range(0, 12, (3, 4))}
    path = ck.save(tmp_path, 2, model={"w": one}, optimizer=state, ranges=ranges)
    with pytest.raises(CheckpointError, match="w has 2 dimensions, which does not match the saved Adafactor state"):
        ck.load(path).load_optimizer(other, names)


def test_state_of_a_scalar_is_sharded_like_it_but_for_the_step_count(tmp_path: Path) -> None:
    """Adagrad's state has other names than that of Adam, and is of the shape of the parameter too."""
    ranges = {"w": Range(0, 1, ())}
    saved, loaded = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer, other = (torch.optim.Adagrad([parameter]) for parameter in (saved, loaded))
    saved.grad = torch.full((1,), 2.0)
    optimizer.step()
    state = ck.optimizer_state(optimizer, {saved: "w"})
    path = ck.save(tmp_path, 1, model={"w": saved}, optimizer=state, ranges=ranges)
    ck.load(path).load_optimizer(other, {loaded: "w"}, ranges)
    for key, tensor in optimizer.state[saved].items():
        assert same_bits(other.state[loaded][key], tensor), key


def test_step_counts_of_every_element_are_sharded(tmp_path: Path) -> None:
    """torch's optimizers count the steps of a parameter; others count those of its elements."""
    parameter, shard = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(5))
    optimizer, other = (torch.optim.SGD([each]) for each in (parameter, shard))
    optimizer.state[parameter] = {"step": torch.arange(12.0).reshape(3, 4)}
    state = ck.optimizer_state(optimizer, {parameter: "w"})
    path = ck.save(tmp_path, 1, model={"w": parameter}, optimizer=state)
    ck.load(path).load_optimizer(other, {shard: "w"}, {"w": Range(4, 9, (3, 4))})
    assert other.state[shard]["step"].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_checkpoints_of_the_first_version_load(tmp_path: Path) -> None:
    held = list(
        processes(
            Layout((tuple(NAMES),), 1, "copies"),
            {n: torch.randn(s) for n, s in zip(NAMES, SHAPES, strict=True)},
            MAKERS["adamw"],
        )
    )
    set_states(held[0], "adamw")
    (path,) = save(tmp_path, 1, held)

    def first_version(data: dict[str, Any]) -> None:
        data["version"] = 1
        del data["compute_type"]
        for part in data["parts"]:
            del part["pieces"], part["optimizer_pieces"]

    rewrite_manifest(path, first_version)
    layout = Layout((tuple(NAMES),), 3, "elements")
    blank = {name: torch.zeros(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
    for process in processes(layout, blank, MAKERS["adamw"]):
        load(path, process)
        for name, parameter in process.model.items():
            assert same_bits(parameter, part_of(held[0].model[name].detach(), process.ranges[name]))


def test_ties_that_no_rank_sees_are_told(tmp_path: Path) -> None:
    parts = [(0, 5), (5, 12)]
    (path,) = set(save_parts(tmp_path, parts, ties={"head": "w"}))
    opened = ck.load(path)
    assert torch.equal(opened.tensor("head"), opened.tensor("w"))


def test_ls_shows_whole_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = set(save_parts(tmp_path, [(0, 5), (5, 12)]))
    assert cli.main(["ls", str(path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert " ".join(line.split()) == "w F32 3 x 4 48 B model-00001-of-00002.safetensors and 1 more"
    assert cli.main(["ls", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    assert row["pieces"] == [["model-00001-of-00002.safetensors", 0, 5], ["model-00002-of-00002.safetensors", 5, 12]]
