"""Checkpoints that version 0.1.0 wrote load to the last bit.

`whole` is of two ranks with whole parameters (AdamW, dropout), `zero3` of two replicas of two ranks with sharded ones
(bfloat16, Muon). The `.safetensors` file beside each holds what version 0.1.0 itself read of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipeloom.cli import main
from pipeloom.train import checkpoint as ck
from pipeloom.train.checkpoint.manifest import verify

HERE = Path(__file__).with_name("checkpoints_of_0_1_0")


@pytest.mark.parametrize("name", ["whole", "zero3"])
def test_every_tensor_is_what_0_1_0_read(name: str) -> None:
    expected = safetensors.torch.load_file(HERE / f"{name}.safetensors")
    verify(HERE / name)
    checkpoint = ck.load(HERE / name)
    names = {key.split("/")[1] for key in expected}
    assert {key.split("/")[0] for key in expected} == {"model", "optimizer"}
    for parameter in names:
        state = checkpoint._optimizer_state_of(parameter, None, read=True)
        found = {f"optimizer/{parameter}/{key}": value for key, value in state.items()}
        found[f"model/{parameter}"] = checkpoint.tensor(parameter)
        for key, value in found.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == expected[key].dtype, key
                assert torch.equal(value, expected.pop(key)), key
    assert not expected


@pytest.mark.parametrize("name", ["whole", "zero3"])
def test_training_goes_on_from_it_in_another_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = json.loads((HERE / name / "manifest.json").read_text())["state"]["config"]
    monkeypatch.chdir(tmp_path)
    Path("text.py").write_text("\n".join(f"def f{i}(x): return x + {i * i}" for i in range(400)))
    shutil.copytree(HERE / name, "checkpoint-4")
    options = {
        "data.path": "text.py",
        **{f"model.{key}": saved["model"][key] for key in ("layers", "width", "heads", "sequence_length")},
        "model.tie_embeddings": saved["model"]["tie_embeddings"],
        "model.dropout": saved["model"]["dropout"],
        "precision.dtype": saved["precision"]["dtype"],
        "optimizer.name": saved["optimizer"]["name"],
        "batch.size": 4,
        "batch.microbatches": 2,
        "parallel.pipeline": 1,
        "steps": 6,
        "sample_tokens": 0,
        "eval_steps": 0,
        "output_dir": "out",
        "resume_from_checkpoint": "checkpoint-4",
        "local": True,
    }
    assert main(["train", *(f"--{key}={str(value).lower()}" for key, value in options.items())]) == 0
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [5, 6]
