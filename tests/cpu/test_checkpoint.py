"""Checkpoints keep every bit, notice every flipped one, survive being killed, and load into any layout."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipeloom.cli import checkpoint as cli
from pipeloom.common import tensor_file
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, InputError
from pipeloom.processes.exchange import DistributedExchange
from pipeloom.train import checkpoint as ck
from pipeloom.train.checkpoint import directory as checkpoint_directory
from pipeloom.train.checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, SEAL_NAME, seal
from pipeloom.train.checkpoint.tensor_reader import TensorFiles
from tests.cpu.pairwise import in_turn

from .ranks import run_ranks
from .thread_exchange import ThreadExchange

# --- helpers ----------------------------------------------------------------------------------------------------------


def build(seed: int = 0, *, tied: bool = False) -> nn.Sequential:
    """Five layers; the last may share the weight of the second."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(7, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)]
    model = nn.Sequential(*layers)
    if tied:
        model[4].weight = model[1].weight
    return model


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 7, (8,))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cut(tensors: dict[str, Any], num_ranks: int, rank: int) -> dict[str, Any]:
    """The entries of the layers that `rank` has when five layers are cut for `num_ranks`."""
    mine = [layer for layer in range(5) if layer * num_ranks // 5 == rank]
    return {name: value for name, value in tensors.items() if int(name.split(".")[0]) in mine}


def on_threads(work: Callable[[ThreadExchange], Any], size: int) -> list[Any]:
    """`work` on one thread a rank; answers or exceptions by rank."""
    answers: list[Any] = [None] * size

    def run(exchange: ThreadExchange) -> None:
        try:
            answers[exchange.rank] = work(exchange)
        except Exception as error:
            answers[exchange.rank] = error

    threads = [threading.Thread(target=run, args=(exchange,)) for exchange in ThreadExchange.group(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a rank hangs"
    return answers


def rank_optimizer(model: nn.Module, num_ranks: int, rank: int, lr: float = 0.01) -> torch.optim.Optimizer:
    mine = cut(dict(model.named_parameters()), num_ranks, rank)
    return torch.optim.AdamW(mine.values(), lr=lr)


def save_in_parts(
    output_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int
) -> Path:
    """Save `model` as `num_ranks` ranks would. The optimizer is one for all: its state is filtered for each rank."""
    whole = ck.optimizer_state(optimizer, names_of(model))

    def work(exchange: ThreadExchange) -> Path:
        def mine(entries: dict[str, Any]) -> dict[str, Any]:
            return cut(entries, num_ranks, exchange.rank)

        groups = [{**g, "parameters": list(mine(dict.fromkeys(g["parameters"])))} for g in whole.groups]
        part = ck.OptimizerState(whole.optimizer_class, mine(whole.tensors), mine(whole.values), groups)
        tensors = mine(model.state_dict())
        return ck.save(output_dir, step, model=tensors, optimizer=part, layout={"ranks": num_ranks}, exchange=exchange)

    answers = on_threads(work, num_ranks)
    assert answers == [output_dir / f"checkpoint-{step}"] * num_ranks
    return answers[0]


def same_bits(left: Tensor, right: Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


# --- every bit is kept ------------------------------------------------------------------------------------------------


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(24, generator=generator)
    noise = torch.randint(-(2**15), 2**15, (5, 3), generator=generator, dtype=torch.int16)
    tensors = {
        "bf16 any bits": noise.view(torch.bfloat16),
        "f16 any bits": noise.view(torch.float16),
        "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
        "f64": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "c64": torch.randn(3, generator=generator, dtype=torch.complex64).conj(),
        "f8": noise.view(torch.uint8).view(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "scalar int": torch.tensor(2**62 + 1),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "transposed": flat.view(4, 6).t(),
        "strided": flat[1::5],
        "first half": flat[:12],
        "second half": flat[12:],
        "overlapping": flat[6:18],
        "expanded": flat[:1].expand(4),
        "parameter": nn.Parameter(flat[:3]),
        "ünïcode": torch.arange(5).to(torch.uint16),
    }
    tensors |= {str(dtype): torch.arange(7).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int32, torch.uint64)}
    path = ck.save(tmp_path, 1, model=tensors)
    opened = ck.load(path)
    for name, tensor in tensors.items():
        assert same_bits(opened.tensor(name), tensor.detach().resolve_conj()), name
    # other programs read the file too
    read = safetensors.torch.load_file(path / "model-00001-of-00001.safetensors")
    assert read.keys() == tensors.keys()
    assert same_bits(read["transposed"], tensors["transposed"])
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_other_kinds_of_tensor_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="sparse one is"):
        ck.save(tmp_path, 1, model={"sparse one": torch.eye(3).to_sparse()})
    assert list(tmp_path.iterdir()) == []


def test_loaded_tensors_outlive_the_files(tmp_path: Path) -> None:
    values = torch.arange(4096.0)
    opened = ck.load(ck.save(tmp_path, 1, model={"x": values}))
    first = opened.tensor("x")
    first += 1
    for file in opened.path.iterdir():
        file.write_bytes(b"")
    assert torch.equal(first, values + 1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bitwise(kind: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    model = build()
    model[3].weight.requires_grad_(False)  # a parameter without a gradient has no state
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = make([{"params": decayed, "lr": 0.02}, {"params": others}])
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] *= 0.5  # as a learning-rate schedule would
    state = ck.optimizer_state(optimizer, names_of(model))
    path = ck.save(tmp_path, 3, model=model.state_dict(), optimizer=state, random=ck.random_state())
    expected = train(model, optimizer, 4)

    other = build(seed=9)
    other[3].weight.requires_grad_(False)
    wide, narrow = ([p for p in other.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    second = make([{"params": wide, "lr": 7.0}, {"params": narrow}])
    second.param_groups[1]["lr"] *= 3
    train(other, second, 1)  # state that must be replaced
    opened = ck.load(path)
    opened.load_model(other.state_dict(), all_names=other.state_dict())
    opened.load_optimizer(second, names_of(other))
    saved_random = opened.random(0, 1)
    assert saved_random is not None
    ck.restore_random_state(saved_random)
    assert train(other, second, 4) == expected
    for (name, tensor), value in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert same_bits(tensor, value), name
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert type(second.param_groups[0].get("betas")) is type(optimizer.param_groups[0].get("betas"))


def test_moments_keep_their_own_type(tmp_path: Path) -> None:
    """torch's load_state_dict would cast them to the type of the parameter."""
    parameter = nn.Parameter(torch.randn(4).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter] = {"momentum_buffer": torch.randn(4, dtype=torch.float32), "count": 3, "flag": None}
    state = ck.optimizer_state(optimizer, {parameter: "w"})
    path = ck.save(tmp_path, 1, model={"w": parameter}, optimizer=state)
    before = dict(optimizer.state[parameter])
    optimizer.state.clear()
    ck.load(path).load_optimizer(optimizer, {parameter: "w"})
    after = optimizer.state[parameter]
    assert same_bits(after.pop("momentum_buffer"), before.pop("momentum_buffer"))
    assert after == before


@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_step_counts_are_on_the_device_where_fused_and_capturable_optimizers_read_them(
    tmp_path: Path, options: dict[str, bool], device: str
) -> None:
    parameter, elsewhere = nn.Parameter(torch.randn(4)), nn.Parameter(torch.empty(4, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(options)
    path = ck.save(tmp_path, 1, model={"w": parameter}, optimizer=ck.optimizer_state(optimizer, {parameter: "w"}))
    other = torch.optim.Adam([elsewhere])
    ck.load(path).load_optimizer(other, {elsewhere: "w"})
    assert other.state[elsewhere]["step"].device.type == device
    assert other.state[elsewhere]["exp_avg"].device.type == "meta"


def test_no_optimizer_state_is_read_before_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([saved], momentum=0.9)
    saved.sum().backward()
    optimizer.step()
    path = ck.save(tmp_path, 1, model={"w": saved}, optimizer=ck.optimizer_state(optimizer, {saved: "w"}))
    reads: list[Any] = []
    monkeypatch.setattr(TensorFiles, "full", lambda *arguments: reads.append(arguments))
    with pytest.raises(CheckpointError, match=r"'momentum_buffer' of w has shape \(2, 2\), not \(4,\)"):
        ck.load(path).load_optimizer(torch.optim.SGD([other]), {other: "w"})
    assert not reads


def test_no_optimizer_state_is_read_before_all_of_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = dict(zip((nn.Parameter(torch.zeros(4)) for _ in range(2)), "ab", strict=True))
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    model = {name: parameter for parameter, name in parameters.items()}
    path = ck.save(tmp_path, 1, model=model, optimizer=ck.optimizer_state(optimizer, parameters))
    calls, tensor = [], TensorFiles.tensor

    def counted(files: TensorFiles, label: str, *place: Any, read: bool = True) -> Tensor:
        calls.append((label.split()[-1], read))
        return tensor(files, label, *place, read=read)

    monkeypatch.setattr(TensorFiles, "tensor", counted)
    ck.load(path).load_optimizer(optimizer, parameters)
    assert calls == [("a", False), ("b", False), ("a", True), ("b", True)]


def test_random_generators_continue(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), np.random.normal(), random.gauss(0, 1), random.random()]

    draw()  # both gaussians keep a spare value: the state is in between
    path = ck.save(tmp_path, 1, model={}, random=ck.random_state())
    expected = draw()
    state = ck.load(path).random(0, 1)
    assert state is not None
    ck.restore_random_state(state)
    assert draw() == expected
    assert ck.load(path).random(0, 2) is None  # another number of ranks seeds anew


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_to_one_to_four(tied: bool, tmp_path: Path) -> None:
    model = build(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    save_in_parts(tmp_path, 2, model, optimizer, 2)
    for source, size in ((2, 1), (1, 4), (4, 2)):
        opened = ck.load(tmp_path / f"checkpoint-{source}")
        assert opened.num_parts == source
        assert opened.layout == {"ranks": source}
        fresh = build(seed=5, tied=tied)
        for rank in range(size):
            opened.load_model(cut(fresh.state_dict(), size, rank), all_names=fresh.state_dict())
        second = torch.optim.AdamW(fresh.parameters(), lr=9.0)
        opened.load_optimizer(second, names_of(fresh))
        for (name, saved), loaded in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
            assert same_bits(saved, loaded), name
        for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
            assert all(same_bits(optimizer.state[old][key], second.state[new][key]) for key in optimizer.state[old])
        save_in_parts(tmp_path, size, fresh, second, size)
        ck.verify(tmp_path / f"checkpoint-{size}")


def test_every_rank_loads_its_own_optimizer(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    path = ck.save(tmp_path, 2, model=model.state_dict(), optimizer=ck.optimizer_state(optimizer, names_of(model)))
    for rank in range(4):
        mine = rank_optimizer(model, 4, rank, lr=5.0)
        ck.load(path).load_optimizer(mine, names_of(model))
        assert mine.param_groups[0]["lr"] == 0.01
        for parameter in mine.param_groups[0]["params"]:
            assert same_bits(mine.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_what_several_ranks_hold_is_written_once_by_the_lowest(tmp_path: Path) -> None:
    shared, alone = torch.randn(3), torch.randn(4)

    def work(exchange: ThreadExchange) -> Path:
        tensors = {"shared": shared.clone()} | ({"alone": alone} if exchange.rank == 1 else {})
        return ck.save(tmp_path, 1, model=tensors, exchange=exchange)

    path = on_threads(work, 3)[0]
    opened = ck.load(path)
    assert opened.weight_map == {
        "shared": "model-00001-of-00003.safetensors",
        "alone": "model-00002-of-00003.safetensors",
    }
    sizes = [len(tensor_file.tensor_sources(path / f"model-0000{rank}-of-00003.safetensors")) for rank in (1, 2, 3)]
    assert sizes == [1, 1, 0]
    assert same_bits(opened.tensor("alone"), alone)


def test_a_tied_parameter_is_stored_once_and_found_under_both_names(tmp_path: Path) -> None:
    model = build(tied=True)
    opened = ck.load(ck.save(tmp_path, 1, model=model.state_dict()))
    assert "4.weight" not in opened.weight_map
    assert same_bits(opened.tensor("4.weight"), model[1].weight)
    untied = build(seed=3)
    opened.load_model(untied.state_dict(), all_names=untied.state_dict())
    assert torch.equal(untied[4].weight, model[1].weight)


# --- what does not fit is refused -------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = ck.save(tmp_path, 1, model=model.state_dict(), optimizer=ck.optimizer_state(optimizer, names_of(model)))
    opened = ck.load(path)
    target = {"1.weight": torch.zeros(6, 6)}
    for extra, words in (
        ({"5.weight": torch.zeros(6)}, "no tensor 5.weight"),
        ({"3.weight": torch.zeros(6, 5)}, r"3.weight has shape \(6, 6\) .* and \(6, 5\)"),
        ({"3.weight": torch.zeros(6, 6).bfloat16()}, "3.weight has type F32 .* and BF16"),
    ):
        with pytest.raises(CheckpointError, match=words) as error:
            opened.load_model(target | extra)
        one_line(error)
        assert not target["1.weight"].any(), "nothing may be changed before all is checked"
    empty = ck.load(ck.save(tmp_path / "empty", 1, model={"w": torch.zeros(0, 3)}))
    with pytest.raises(CheckpointError, match=r"w has shape \(0, 3\) in .* and \(0, 4\) in the model"):
        empty.load_model({"w": torch.zeros(0, 4)})
    with pytest.raises(CheckpointError, match=r"the model has no tensor 4\.weight.*different model"):
        opened.load_model(target, all_names=[name for name in model.state_dict() if name != "4.weight"])
    with pytest.raises(CheckpointError, match="saved with AdamW, not SGD"):
        opened.load_optimizer(torch.optim.SGD(model.parameters()), names_of(model))
    stranger = nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match="no optimizer state of stranger"):
        opened.load_optimizer(torch.optim.AdamW([stranger]), {stranger: "stranger"})
    with pytest.raises(CheckpointError, match="is not in the model"):
        opened.load_optimizer(torch.optim.AdamW([stranger]), {})
    with pytest.raises(CheckpointError, match=r"has no optimizer state\. Load only the model"):
        ck.load(ck.save(tmp_path, 2, model={})).load_optimizer(optimizer, names_of(model))


def test_param_groups_that_were_saved_apart_cannot_be_merged(tmp_path: Path) -> None:
    model = build()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.2}])
    path = ck.save(tmp_path, 1, model={}, optimizer=ck.optimizer_state(optimizer, names_of(model)))
    with pytest.raises(CheckpointError, match="different lr"):
        ck.load(path).load_optimizer(torch.optim.AdamW(parameters), names_of(model))


def test_optimizers_with_other_state_are_refused() -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model(torch.arange(7)).square().mean().requires_grad_())
    parameter = next(iter(optimizer.state))
    optimizer.state[parameter]["old_dirs"] = [torch.zeros(3)]
    with pytest.raises(CheckpointError, match=r"LBFGS has state .* of type list"):
        ck.optimizer_state(optimizer, names_of(model))


def test_state_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 0: TypeError"):
        ck.save(tmp_path, 1, model={}, state={"sampler": object()})
    assert list(tmp_path.iterdir()) == []


# --- damage is noticed ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    return save_in_parts(tmp_path, 7, model, optimizer, 2)


def test_one_flipped_bit_in_any_file_is_noticed_and_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(saved.iterdir())
    assert len(files) == 2 + 2 + 3
    generator = random.Random(0)
    for file in files:
        whole = file.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little") if file.suffix == ".safetensors" else len(whole) // 2
        edges = {0, 7, 8, header - 1, min(header, len(whole) - 1), len(whole) // 2, len(whole) - 1}
        if len(whole) < 200:
            edges = set(range(len(whole)))
        for position in sorted(edges | {generator.randrange(len(whole)) for _ in range(8)}):
            flip(file, position, generator.randrange(8))
            with pytest.raises(CheckpointError, match=r"damaged") as error:
                ck.verify(saved)
            named = MANIFEST_NAME if file.name == SEAL_NAME else file.name
            assert named in one_line(error)
            file.write_bytes(whole)
    ck.verify(saved)
    # every byte of the seal, letter case of its digits too
    whole = (saved / SEAL_NAME).read_bytes()
    for position in range(len(whole)):
        for bit in (5, position % 8):
            flip(saved / SEAL_NAME, position, bit)
            with pytest.raises(CheckpointError, match="damaged"):
                ck.load(saved)
            (saved / SEAL_NAME).write_bytes(whole)


def test_loading_alone_notices_damage_in_what_it_reads(saved: Path) -> None:
    model = build()
    whole = (saved / "model-00002-of-00002.safetensors").read_bytes()
    flip(saved / "model-00002-of-00002.safetensors", len(whole) - 1, 3)
    ck.load(saved).load_model(cut(model.state_dict(), 2, 0))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is damaged"):
        ck.load(saved).load_model(cut(model.state_dict(), 2, 1))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_wrong_lengths_and_missing_files_are_noticed(saved: Path, change: Callable[[bytes], bytes]) -> None:
    for file in saved.iterdir():
        whole = file.read_bytes()
        file.write_bytes(change(whole))
        with pytest.raises(CheckpointError, match="damaged"):
            ck.verify(saved)
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name.removesuffix(".sha256")):
            ck.verify(saved)
        file.write_bytes(whole)
    ck.verify(saved)


def rewrite_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((checkpoint / MANIFEST_NAME).read_text())
    text = json.dumps(change(data) or data).encode()
    (checkpoint / MANIFEST_NAME).write_bytes(text)
    (checkpoint / SEAL_NAME).write_bytes(seal(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(version=99), "format version 99"),
        (lambda data: data.update(format="other"), "is not a manifest of pipeloom: format is 'other'"),
        (lambda data: [1], "is not a manifest of pipeloom"),
        (lambda data: data.pop("files") and None, "is not a valid manifest"),
        (lambda data: data["files"].update({"../x": {"bytes": 1, "sha256": "0"}}), "is not a valid manifest"),
        (lambda data: data["parts"][0].update(unheard=1), "is not a valid manifest"),
        (lambda data: data["parts"][0].update(model="../../model.safetensors"), "of a part is missing in files"),
        (lambda data: data["parts"][0].update(random="other"), "of a part is missing in files"),
        (lambda data: data["parts"][0].update(optimizer_class=["AdamW"]), "Part.optimizer_class="),
        (lambda data: data["parts"][0]["optimizer_tensors"].update(weight=1.5), "Part.optimizer_tensors.weight.="),
    ],
)
def test_foreign_manifests_are_refused(saved: Path, change: Callable[[Any], Any], words: str) -> None:
    rewrite_manifest(saved, change)
    with pytest.raises(CheckpointError, match=words) as error:
        ck.load(saved)
    one_line(error)


def test_an_index_names_no_file_but_those_of_the_model(saved: Path) -> None:
    index = json.loads((saved / INDEX_NAME).read_text())
    index["weight_map"] |= dict.fromkeys(index["weight_map"], "../../model.safetensors")
    text = json.dumps(index).encode()
    (saved / INDEX_NAME).write_bytes(text)
    record = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    rewrite_manifest(saved, lambda data: data["files"].update({INDEX_NAME: record}))
    with pytest.raises(CheckpointError, match="has no model tensors") as error:
        ck.load(saved).tensor(next(iter(index["weight_map"])))
    one_line(error)


def test_foreign_directories_are_refused(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none", "not a directory"),
        (tmp_path, "no complete checkpoint"),
        (tmp_path / "checkpoint-3", f"no {MANIFEST_NAME}"),
    ):
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=words):
            ck.load(path)


def test_sha256sum_accepts_the_seal(saved: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", SEAL_NAME], cwd=saved, check=True, capture_output=True)


def test_nothing_is_ever_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    model = build(seed=1)
    opened = ck.load(saved)
    opened.load_model(model.state_dict())
    opened.load_optimizer(torch.optim.AdamW(model.parameters()), names_of(model))


# --- interrupted saves ------------------------------------------------------------------------------------------------


def save_by_ranks(directory: Path, step: int, value: int, parts: list[tuple[int, int]]) -> None:
    """Save as several ranks would, each with its part of the 1000 elements of a tensor."""

    def one(exchange: ThreadExchange) -> None:
        start, stop = parts[exchange.rank]
        model = {"x": torch.full((stop - start,), float(value)), "y": torch.tensor(value)}
        ck.save(
            directory, step, model=model, ranges={"x": Range(start, stop, (1000,))}, exchange=exchange,
            random=ck.random_state(), state={"value": value}, total_limit=2,
        )  # fmt: skip

    assert on_threads(one, len(parts)) == [None] * len(parts)


def killed_at_call(number: int) -> None:
    """From now on, this process is killed at its call of that number that changes the disk, in whichever thread."""
    numbers = itertools.count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
        setattr(os, name, counted(getattr(os, name)))
    tensor_file.HashingFile.write = counted(tensor_file.HashingFile.write)  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_a_save_killed_anywhere_leaves_a_good_checkpoint(mode: str, tmp_path: Path) -> None:
    """Of a third step, or over an older second one and in pieces by two ranks; killed at every call in turn."""
    overwrite = mode == "overwrite"
    parts = [(0, 400), (400, 1000)] if overwrite else [(0, 1000)]
    for step in (1, 2):
        save_by_ranks(tmp_path / "before", step, step, parts)
    statuses: list[int] = []
    while not statuses or os.WIFSIGNALED(statuses[-1]):
        directory = tmp_path / str(len(statuses) + 1)
        shutil.copytree(tmp_path / "before", directory)
        child = os.fork()
        if not child:
            code = 1
            try:
                killed_at_call(len(statuses) + 1)
                save_by_ranks(directory, 2 if overwrite else 3, 3, parts)
                code = 0
            finally:
                os._exit(code)
        statuses.append(os.waitpid(child, 0)[1])
    assert len(statuses) > 15
    assert statuses[-1] == 0
    outcomes, leftovers = set(), 0
    for number in range(1, len(statuses) + 1):
        directory = tmp_path / str(number)
        leftovers += any(path.name.startswith(".") for path in directory.iterdir())
        for path in directory.glob("checkpoint-*"):
            ck.verify(path)  # whatever is visible is whole, before any cleaning
        found = ck.latest(directory)
        assert found is not None
        opened = ck.load(found)
        ck.verify(found)
        assert opened.state["value"] in (2, 3), number
        assert set(opened.tensor("x").tolist()) == {opened.tensor("y").item()} == {opened.state["value"]}
        outcomes.add(opened.state["value"])
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")], "the next start cleans up"
    assert outcomes == {2, 3}
    assert leftovers > 5, "the kills did not hit the save"


@pytest.mark.parametrize("before_the_lock", [0, 1, 2])
def test_a_reader_that_cleans_while_a_save_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_the_lock: int
) -> None:
    made = 0
    mkdir = Path.mkdir

    def then_clean(path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        mkdir(path, *args, **kwargs)
        made += ".partial-" in path.name
        if made <= before_the_lock:
            checkpoint_directory.clean(tmp_path)

    monkeypatch.setattr(Path, "mkdir", then_clean)
    with checkpoint_directory.partial_directory(tmp_path, 2) as partial:
        checkpoint_directory.clean(tmp_path)
        assert partial.is_dir()
        assert [path.name for path in tmp_path.iterdir()] == [partial.name]
    assert made == before_the_lock + 1
    assert not list(tmp_path.iterdir())


def test_a_running_save_is_not_cleaned_away(tmp_path: Path) -> None:
    ck.save(tmp_path, 1, model={})
    with checkpoint_directory.partial_directory(tmp_path, 2) as partial:
        assert ck.latest(tmp_path) == tmp_path / "checkpoint-1"
        assert partial.is_dir()
        assert [entry.complete for entry in ck.list_checkpoints(tmp_path)] == [True, False]
    assert not partial.exists()


def test_a_directory_that_goes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the partial directory of a save that ends just then."""
    ck.save(tmp_path, 1, model={})
    gone = tmp_path / ".checkpoint-2.partial-0a"
    monkeypatch.setattr(checkpoint_directory, "_entries", lambda path: [gone, tmp_path / "checkpoint-1"])
    assert [(entry.step, entry.complete) for entry in ck.list_checkpoints(tmp_path)] == [(1, True), (2, False)]


def test_a_directory_that_goes_while_a_save_deletes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck.save(tmp_path, 1, model={})
    listed = checkpoint_directory.list_checkpoints

    def then_one_goes(directory: Path) -> list[checkpoint_directory.CheckpointEntry]:
        found = listed(directory)
        shutil.rmtree(tmp_path / "checkpoint-1")
        return found

    monkeypatch.setattr(checkpoint_directory, "list_checkpoints", then_one_goes)
    ck.save(tmp_path, 2, model={}, total_limit=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


class FullDisk(io.FileIO):
    """A disk that takes so many bytes and no more."""

    room = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if FullDisk.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[: FullDisk.room]
        FullDisk.room -= view.nbytes
        return super().write(view)


@pytest.mark.parametrize(
    ("victim", "room"),
    in_turn(["model-00001", "model-00002", "model.safetensors.index", "manifest.json"], [0, 4, 100, 5000]),
)
def test_a_full_disk_on_any_rank_is_one_error_on_every_rank(
    victim: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {str(index): torch.randn(3000) for index in range(2)}

    def work(exchange: ThreadExchange) -> Path:
        mine = {str(exchange.rank): tensors[str(exchange.rank)]}
        return ck.save(tmp_path, 1, model=mine, state={"filler": "x" * 6000}, exchange=exchange)

    on_threads(work, 2)
    before = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint-1").iterdir()}

    def open_(path: Path, mode: str, **options: Any) -> Any:
        return FullDisk(path, "x") if path.name.startswith(victim) else open(path, mode, **options)

    FullDisk.room = min(room, 100) if victim.endswith("index") else room
    monkeypatch.setattr(tensor_file, "open", open_, raising=False)
    answers = on_threads(work, 2)
    monkeypatch.undo()
    assert [type(answer) for answer in answers] == [CheckpointError, CheckpointError]
    assert str(answers[0]) == str(answers[1])
    rank = 1 if victim == "model-00002" else 0
    assert f"rank {rank}: " in str(answers[0])
    assert "No space left on device" in str(answers[0])
    assert victim in str(answers[0])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "checkpoint-1").iterdir()} == before
    on_threads(work, 2)  # and once there is room again, it works
    ck.verify(tmp_path / "checkpoint-1")


def test_an_output_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file") as error:
        ck.save(tmp_path / "file" / "out", 1, model={})
    one_line(error)


def test_total_limit_deletes_the_oldest_only_after_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 40, 100):
        ck.save(tmp_path, step, model={}, total_limit=2)
    assert [entry.step for entry in ck.list_checkpoints(tmp_path)] == [40, 100]
    ck.save(tmp_path, 100, model={}, total_limit=2)
    assert [entry.step for entry in ck.list_checkpoints(tmp_path)] == [40, 100]

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_directory.os, "fsync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        ck.save(tmp_path, 200, model={}, total_limit=1)
    monkeypatch.undo()
    assert [entry.step for entry in ck.list_checkpoints(tmp_path)] == [40, 100]
    ck.save(tmp_path, 10, model={}, total_limit=1)
    assert [entry.step for entry in ck.list_checkpoints(tmp_path)] == [10], "the newest save stays, whatever its step"
    with pytest.raises(CheckpointError, match="total_limit=0: at least one checkpoint must be kept"):
        ck.save(tmp_path, 11, model={}, total_limit=0)


def test_latest_is_the_highest_number(tmp_path: Path) -> None:
    assert ck.latest(tmp_path / "none") is None
    assert ck.latest(tmp_path) is None
    for step in (9, 10, 1):
        ck.save(tmp_path, step, model={})
    (tmp_path / "checkpoint-99").mkdir()  # of another program
    (tmp_path / "checkpoint-x").mkdir()
    assert ck.latest(tmp_path) == tmp_path / "checkpoint-10"
    assert ck.load(tmp_path).step == 10


@pytest.mark.parametrize("lost", [SEAL_NAME, MANIFEST_NAME])
def test_the_latest_is_not_passed_over_when_it_is_damaged(
    saved: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ck.save(saved.parent, 3, model={})
    (saved / lost).unlink()
    assert ck.latest(saved.parent) == saved
    with pytest.raises(CheckpointError, match=rf"checkpoint-7/{lost} cannot be read .*use another checkpoint"):
        cli.main(["verify", str(saved.parent)])
    assert cli.main(["ls", str(saved.parent)]) == 0
    assert re.search(r"\n3 .* ok .*\n7 .* damaged", capsys.readouterr().out)


# --- processes --------------------------------------------------------------------------------------------------------


def _save_and_load(rank: int, base: Path) -> str:
    exchange, size = DistributedExchange(), 2
    payload = bytes(range(256)) * rank
    assert exchange.all_gather(payload) == [bytes(range(256)) * other for other in range(size)]
    assert exchange.all_gather(b"") == [b""] * size
    torch.manual_seed(rank)
    random = ck.random_state()
    ck.save(base / "out", 4, model={f"w{rank}": torch.full((2,), float(rank))}, random=random, exchange=exchange)
    opened = ck.load(base / "out")
    assert opened.tensor(f"w{size - 1 - rank}")[0] == size - 1 - rank
    assert torch.equal(opened.random(rank, size).tensors["torch"], random.tensors["torch"])
    with pytest.raises(CheckpointError) as caught:
        ck.save(base / "out", 5, model={"w": torch.eye(2).to_sparse()} if rank == 1 else {}, exchange=exchange)
    return str(caught.value)


def test_processes_under_gloo(tmp_path: Path) -> None:
    said = run_ranks(_save_and_load, 2, tmp_path)
    assert said[0] == said[1]
    assert "rank 1: w is torch.float32, torch.sparse_coo" in said[0]
    assert [entry.path.name for entry in ck.list_checkpoints(tmp_path / "out")] == ["checkpoint-4"]
    ck.verify(tmp_path / "out" / "checkpoint-4")


# --- the command ------------------------------------------------------------------------------------------------------


def test_ls_lists_checkpoints_and_tensors(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved.parent / ".checkpoint-8.partial-0a").mkdir()
    assert cli.main(["ls", str(saved.parent), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["ranks"], row["layout"], row["status"]) for row in rows] == [
        (7, 2, {"ranks": 2}, "ok"),
        (8, None, None, "partial"),
    ]
    assert cli.main(["ls", str(saved), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {row["name"]: (row["dtype"], tuple(row["shape"])) for row in tensors} == {
        name: ({"torch.float32": "F32", "torch.int64": "I64"}[str(tensor.dtype)], tuple(tensor.shape))
        for name, tensor in build().state_dict().items()
    }
    for target in (saved.parent, saved):
        assert cli.main(["ls", str(target)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks" in out
    assert "2.num_batches_tracked  I64    scalar" in out
    renamed = saved.rename(saved.with_name("checkpoint-12"))
    for command, said in (("ls", "12 .* renamed: of step 7 "), ("verify", "ok, step 7 .its name has another step., ")):
        assert cli.main([command, str(saved.parent)]) == 0
        assert re.search(said, capsys.readouterr().out)
    renamed.rename(saved)
    (saved / "model-00001-of-00002.safetensors").unlink()
    assert cli.main(["ls", str(saved.parent)]) == 0
    assert "damaged: model-00001-of-00002.safetensors" in capsys.readouterr().out


def test_verify_answers_in_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(saved.parent)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    flip(saved / "optimizer-00001-of-00002.safetensors", 100, 0)
    with pytest.raises(InputError, match=r"optimizer-00001-of-00002\.safetensors is damaged"):
        cli.main(["verify", str(saved)])


@pytest.mark.parametrize("arguments", [[], ["--single"], ["--ranks", "1"], ["--ranks", "3"], ["--ranks", "11"]])
def test_convert_keeps_every_value(arguments: list[str], saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "export"
    assert cli.main(["convert", str(saved), str(out), *arguments]) == 0
    num_files = int(arguments[-1]) if "--ranks" in arguments else 1
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index.values()))
    assert len(files) == num_files
    opened = ck.load(saved)
    assert index.keys() == opened.weight_map.keys()
    for file in files:
        for name, tensor in safetensors.torch.load_file(file).items():
            assert index[name] == file.name
            assert same_bits(tensor, opened.tensor(name))
    if num_files == 3:
        assert max(file.stat().st_size for file in files) < 2.5 * min(file.stat().st_size for file in files)
    with pytest.raises(InputError, match="not an empty directory"):
        cli.main(["convert", str(saved), str(out)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "{saved}", "{out}", "--ranks", "0"], "--ranks=0: must be from 1 to"),
        (["convert", "{saved}", "{out}", "--ranks", "99"], "--ranks=99: must be"),
        (["convert", "{saved}", "{out}", "--ranks", "2", "--single"], "contradict"),
        (["convert", "{out}", "{out}"], "is not a directory"),
        (["ls", "{out}"], "is not a directory"),
        (["verfy", "{saved}"], "did you mean verify"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str, saved: Path, tmp_path: Path) -> None:
    words_given = [word.format(saved=saved, out=tmp_path / "out") for word in arguments]
    with pytest.raises(InputError, match=words) as error:
        cli.main(words_given)
    one_line(error)
    assert not (tmp_path / "out").exists()


def test_convert_of_a_damaged_checkpoint_makes_nothing(saved: Path, tmp_path: Path) -> None:
    file = saved / "model-00002-of-00002.safetensors"
    flip(file, file.stat().st_size - 1, 0)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is damaged"):
        cli.main(["convert", str(saved), str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [saved.name]


def test_looking_at_checkpoints_needs_no_torch(saved: Path) -> None:
    script = (
        "import sys; from pipeloom.cli.checkpoint import main;"
        "main(['ls', sys.argv[1]]); main(['verify', sys.argv[1]]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(saved)], check=True, capture_output=True)
