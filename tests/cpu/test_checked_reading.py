"""Bytes of checkpoints are compared with their hashes where they are used, block by block."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from pipeloom.common.recorded_file import BLOCK_BYTES, FileRecord, RecordedFile
from pipeloom.common.tensor_file import write_bytes, write_tensors
from pipeloom.errors import CheckpointError
from pipeloom.pretrained.files import tensor_source
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.checked_tensors import CheckedTensors
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify


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
