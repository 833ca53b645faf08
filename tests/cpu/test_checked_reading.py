"""Bytes of checkpoints are compared with their hashes where they are used, block by block."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from pipeloom.common.recorded_file import BLOCK_BYTES, FileRecord, RecordedFile
from pipeloom.common.tensor_file import write_bytes, write_tensors
from pipeloom.errors import CheckpointError
from pipeloom.pretrained.checked_tensors import CheckedTensors
from pipeloom.pretrained.files import tensor_source
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, SEAL_NAME, read_manifest, verify
from pipeloom.train.checkpoint.resume import find_good


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.fixture(scope="module")
def content():
    generator = torch.Generator().manual_seed(1)
    shapes = {"table": (700, 1024), "left": (1024, 300), "scalar": (), "empty": (0, 4), "bias": (7,), "cube": (5, 4, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_blocks_have_their_own_hashes(tmp_path):
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 17)
    record = write_bytes(tmp_path / "file", data)
    assert FileRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert len(record.blocks) == 3
    with pytest.raises(ValueError, match="2 blocks of a file of"):
        FileRecord.from_dict(replace(record, blocks=record.blocks[:2]).to_dict())
    file = RecordedFile(tmp_path / "file", record)
    for start, stop in ((0, 8), (BLOCK_BYTES - 3, BLOCK_BYTES + 5), (5, len(data) + 9), (len(data), len(data)), (9, 9)):
        assert file.read(start, stop) == data[start:stop]
    flip(tmp_path / "file", BLOCK_BYTES + 11)
    changed = RecordedFile(tmp_path / "file", record)
    assert changed.read(2 * BLOCK_BYTES, len(data)) == data[2 * BLOCK_BYTES :]
    with pytest.raises(CheckpointError, match="file is damaged: its SHA-256 differs"):
        changed.read(0, BLOCK_BYTES + 1)
    with pytest.raises(CheckpointError, match="file is damaged"):  # as earlier releases wrote it
        RecordedFile(tmp_path / "file", replace(record, blocks=()))
    short = write_bytes(tmp_path / "short", b"abc")
    assert short.blocks == ()
    flip(tmp_path / "short", 1)
    with pytest.raises(CheckpointError, match="short is damaged"):
        RecordedFile(tmp_path / "short", short).read(2, 3)


def test_slices_are_those_of_safetensors(tmp_path, content):
    record = write_tensors(tmp_path / "file", {name: tensor_source(name, tensor) for name, tensor in content.items()})
    ours, draw = CheckedTensors(tmp_path / "file", record), random.Random(2)
    with safe_open(tmp_path / "file", "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name, tensor in content.items():
            assert ours.get_slice(name).get_shape() == list(tensor.shape)
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            assert torch.equal(ours.get_tensor(name), tensor)
            for _ in range(8 if tensor.dim() and tensor.numel() else 0):
                bounds = [sorted((draw.randrange(size + 1), draw.randrange(size + 1))) for size in tensor.shape]
                index = tuple(slice(start, stop) for start, stop in bounds[: draw.randint(1, tensor.dim())])
                assert torch.equal(ours.get_slice(name)[index], tensor[index]), (name, index)
        for first, second in itertools.product(range(5), range(4)):
            index = (slice(first, first + 1), slice(second, second + 1))
            assert torch.equal(ours.get_slice("cube")[index], theirs.get_slice("cube")[index])
    with pytest.raises(CheckpointError, match="has no tensor other"):
        ours.get_tensor("other")


def test_a_flip_after_the_check_of_the_whole_is_noticed(tmp_path, content):
    """What was compared before a run starts may change until its processes read it."""
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in content.items() if tensor.numel()}
    optimizer = torch.optim.AdamW(parameters.values())
    torch.stack([p.square().sum() for p in parameters.values()]).sum().backward()
    optimizer.step()
    names = {parameter: name for name, parameter in parameters.items()}
    path = checkpoint.save(
        tmp_path,
        3,
        model={name: parameter.detach() for name, parameter in parameters.items()},
        optimizer=checkpoint.optimizer_state(optimizer, names),
    )

    def load(opened):
        opened.load_model({name: torch.empty_like(p) for name, p in parameters.items()})
        opened.load_optimizer(torch.optim.AdamW(parameters.values()), names)

    draw, files = random.Random(3), read_manifest(path).files
    chosen = [name for name in files if name.endswith(".safetensors")]
    for name, _ in itertools.product([*chosen, "model.safetensors.index.json"], range(4)):
        verify(path)
        opened = checkpoint.load(path)
        position = draw.randrange(files[name].bytes)
        flip(path / name, position)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            load(opened)
        flip(path / name, position)
    found = {name: torch.empty_like(p) for name, p in parameters.items()}
    checkpoint.load(path).load_model(found)
    assert all(torch.equal(found[name], p) for name, p in parameters.items())
    assert '"blocks"' in (path / MANIFEST_NAME).read_text()


def saved_run(directory, steps):
    for step in steps:
        checkpoint.save(directory, step, model={"weight": torch.ones(3)}, state={"model": {}})


def test_auto_passes_over_damaged_checkpoints(tmp_path):
    """They are kept under other names; the newest good one is used, by its step."""
    saved_run(tmp_path, (1, 9, 10, 12))
    flip(tmp_path / "checkpoint-12" / "model-00001-of-00001.safetensors", 90)
    (tmp_path / "checkpoint-10" / SEAL_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-12/model.* is damaged.*good one: --.*checkpoint-9; auto"):
        find_good("latest", tmp_path, leads=True)
    with pytest.raises(CheckpointError, match=r"checkpoint-12/model.* is damaged"):
        find_good(str(tmp_path / "checkpoint-12"), tmp_path, leads=True)
    other = find_good("auto", tmp_path, leads=False)
    assert (tmp_path / "checkpoint-12").exists()
    found = find_good("auto", tmp_path, leads=True)
    assert found.path == other.path == tmp_path / "checkpoint-9"
    assert found.manifest.step == 9
    for notice, step in zip(found.notices, (12, 10), strict=True):
        assert f"passed over for checkpoint-9, and kept as checkpoint-{step}.damaged." in notice
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-1", "checkpoint-9", "checkpoint-10.damaged", "checkpoint-12.damaged"
    }  # fmt: skip
    assert find_good("auto", tmp_path, leads=True).notices == []
    saved_run(tmp_path, (12,))
    flip(tmp_path / "checkpoint-12" / "model-00001-of-00001.safetensors", 90)
    assert "kept as checkpoint-12.damaged1." in find_good("auto", tmp_path, leads=True).notices[0]


def test_auto_starts_no_run_over_damaged_checkpoints(tmp_path):
    assert find_good("auto", tmp_path, leads=True) is None
    saved_run(tmp_path, (1, 2))
    for step in (1, 2):
        flip(tmp_path / f"checkpoint-{step}" / MANIFEST_NAME, 30)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"checkpoint-2/manifest.json is damaged.*None of the 2 checkpoints"):
            find_good("auto", tmp_path, leads=True)


def test_a_checkpoint_without_manifest_is_told(tmp_path):
    """Its other files show that it was one; a directory of another program is passed over."""
    saved_run(tmp_path, (1,))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    state = checkpoint.optimizer_state(optimizer, {weight: "weight"})
    path = checkpoint.save(tmp_path, 2, model={"weight": weight.detach()}, optimizer=state)
    (path / MANIFEST_NAME).unlink()
    (path / SEAL_NAME).unlink()
    (tmp_path / "checkpoint-7").mkdir()
    found = find_good("auto", tmp_path, leads=True)
    assert found.path.name == "checkpoint-1"
    assert "checkpoint-2 has no manifest.json" in found.notices[0]


def test_copied_checkpoints_and_pipes_are_passed_over(tmp_path):
    """A directory that says another step than its manifest, and a manifest that would be read for ever."""
    saved_run(tmp_path, (1, 2))
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-9")
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-7")
    (tmp_path / "checkpoint-7" / MANIFEST_NAME).unlink()
    os.mkfifo(tmp_path / "checkpoint-7" / MANIFEST_NAME)
    with pytest.raises(CheckpointError, match=r"checkpoint-9 is the checkpoint of step 1: it was copied or renamed"):
        find_good("latest", tmp_path, leads=True)
    found = find_good("auto", tmp_path, leads=True)
    assert found.path == tmp_path / "checkpoint-2"
    copied, pipe = found.notices
    assert "Name it checkpoint-1, or remove it. It is passed over for checkpoint-2" in copied
    assert f"checkpoint-7/{MANIFEST_NAME} is no regular file." in pipe
    assert find_good(str(tmp_path / "checkpoint-9.damaged"), tmp_path, leads=True).manifest.step == 1


def test_links_to_directories_that_are_gone_are_told(tmp_path):
    link = tmp_path / "checkpoint-7"
    link.symlink_to("gone")
    for wanted in ("latest", "auto"):
        with pytest.raises(CheckpointError, match=r"checkpoint-7 is a link to 'gone', which is not there\. Make"):
            find_good(wanted, tmp_path, leads=True)
    saved_run(tmp_path, (1,))
    with pytest.raises(CheckpointError, match=r"or remove the link\. The newest good one: --.*checkpoint-1; auto"):
        find_good("latest", tmp_path, leads=True)
    for number in ("", "1"):
        found = find_good("auto", tmp_path, leads=True)
        assert found.path == tmp_path / "checkpoint-1"
        assert f"passed over for checkpoint-1, and kept as checkpoint-7.damaged{number}." in found.notices[0]
        link.symlink_to("gone")


def test_of_links_to_surplus_checkpoints_nothing_is_left(tmp_path):
    saved_run(tmp_path / "elsewhere", (1,))
    saved_run(tmp_path / "run", (2,))
    (tmp_path / "run" / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "checkpoint-1")
    checkpoint.save(tmp_path / "run", 3, model={"weight": torch.ones(3)}, total_limit=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-3"]
    verify(tmp_path / "elsewhere" / "checkpoint-1")
