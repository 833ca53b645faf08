"""`Pipeline.save_pretrained`: transformers reads what the processes of a pipeline wrote, each its own part."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import transformers
from safetensors import safe_open

import pipeloom as pl
from pipeloom.errors import CheckpointError, InputError
from pipeloom.models.experts import take_over
from pipeloom.pretrained import load_weights
from tests.cpu.ranks import run_ranks
from tests.cpu.test_pretrained import LLAMA, config

LENGTH = 6


def written_names(directory):
    """The names in all safetensors files."""
    found = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += file.keys()
    return sorted(found)


def trained(home, out, schedule, degrees, data, precision, **saving):
    """Train one step and save; the state of this process after the step, and what the model's own method says."""
    mesh = pl.Mesh(**degrees) if degrees else None
    model = pl.from_pretrained(home).train()
    if {"tp", "ep"} & degrees.keys():
        if "ep" in degrees:
            take_over(model)
        pl.parallelize(model, mesh)
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) % 64
    with pl.Pipeline(model, schedule, mesh=mesh, data=data, precision=precision) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step({"input_ids": ids, "labels": ids})
        optimizer.step()
        assert pipe.save_pretrained(out, **saving) == out
        after = {name: value.clone() for name, value in pipe.state_dict().items()}
    try:
        model.save_pretrained(out.with_name("own"))
        own = None
    except InputError as error:
        own = str(error)
    return before, after, own


@pytest.mark.parametrize(
    ("name", "changes", "degrees", "data", "precision"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}, None, None),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, {"pp": 2, "tp": 2}, None, None),
        ("LlamaForCausalLM", {}, {"pp": 1, "dp": 2, "tp": 2}, "zero1", "bf16"),
        ("MixtralForCausalLM", {"num_local_experts": 4}, {"pp": 2, "dp": 2, "ep": 2}, "zero3", None),
    ],
    ids=str,
)
def test_transformers_reads_what_a_pipeline_wrote(tmp_path, name, changes, degrees, data, precision):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(config("mixtral" if "Mixtral" in name else "llama", **changes))
    home, out = tmp_path / "home", tmp_path / "out"
    model.save_pretrained(home)
    schedule = pl.schedules.build("1f1b", num_ranks=degrees.get("pp", 2), num_microbatches=2)
    size = degrees.get("pp", 1) * degrees.get("dp", 1) * degrees.get("tp", 1)

    def work():
        return trained(home, out, schedule, degrees, data, precision, max_shard_bytes=20_000)

    results = pl.run_threads(size, work) if degrees else [work()]
    before, after = ({k: v for result in results for k, v in result[which].items()} for which in (0, 1))
    for key, value in model.state_dict().items():
        assert torch.equal(before[key], value), key
    read = model_class.from_pretrained(out)
    for key, value in read.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(after[key], value), key
        assert not torch.equal(before[key], value), key
    assert written_names(out) == written_names(home)  # also of experts, which are fused in the model alone
    assert len(list(out.glob("*.safetensors"))) > 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for _, _, own in results:
        assert (own is None) == (not degrees)
        assert own is None or "save_pretrained(DIR) on every process" in own


class Tokenizer:
    def save_pretrained(self, directory):
        Path(directory, "tokenizer.json").write_text("{}")


def test_files_and_their_options(tmp_path):
    model = transformers.LlamaForCausalLM(config("llama"))
    model.generation_config.max_new_tokens = 7
    out = tmp_path / "deep" / "out"
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule) as pipe:
        pipe.save_pretrained(out, Tokenizer(), dtype=torch.bfloat16)
        names = {path.name for path in out.iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        written = json.loads((out / "config.json").read_text())
        assert (written["architectures"], written["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
        read = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert read.generation_config.max_new_tokens == 7
        assert all(torch.equal(value, read.state_dict()[key]) for key, value in model.bfloat16().state_dict().items())
        with pytest.raises(CheckpointError, match=r"exists and is not empty.*overwrite=True"):
            pipe.save_pretrained(out)
        pipe.save_pretrained(out, overwrite=True)
        assert {path.name for path in out.iterdir()} == names - {"tokenizer.json"}
        for arguments, words in (
            ({"max_shard_bytes": 0}, "must be an integer >= 1"),
            ({"dtype": torch.int8}, "must be a floating-point type"),
            ({"tokenizer": "gpt2"}, "tokenizer='gpt2': must be a tokenizer"),
        ):
            with pytest.raises(InputError, match=words):
                pipe.save_pretrained(tmp_path / "other", **arguments)
    other = pl.Pipeline(torch.nn.Linear(2, 2), pl.schedules.build("gpipe", num_ranks=1, num_microbatches=1))
    with other, pytest.raises(InputError, match="writes models of transformers"):
        other.save_pretrained(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith(".")) == []


def test_only_the_directory_of_a_model_is_replaced(tmp_path):
    notes, file, out = tmp_path / "notes", tmp_path / "file", tmp_path / "out"
    notes.mkdir()
    (notes / "a.txt").write_text("kept")
    file.write_text("kept")
    (tmp_path / ".out.partial-0123abcd").mkdir()  # of a killed save
    (tmp_path / ".outer.partial-0123abcd").mkdir()  # of another name
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(transformers.LlamaForCausalLM(config("llama")), schedule) as pipe:
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=r"notes has a\.txt and no config\.json: only the directory"):
                pipe.save_pretrained(notes, overwrite=overwrite)
            with pytest.raises(CheckpointError, match="file is a file: a model is saved as a directory"):
                pipe.save_pretrained(file, overwrite=overwrite)
        pipe.save_pretrained(out)
    assert (notes / "a.txt").read_text() == file.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "file", "out", ".outer.partial-0123abcd"}


def test_processes_save_with_the_same_arguments(tmp_path):
    """The error comes on all of them, and nothing is written."""
    transformers.LlamaForCausalLM(config("llama")).save_pretrained(tmp_path / "home")
    cases = [
        ({"directory": tmp_path / "b"}, "got directory=.*a on rank 0 and .*b on rank 1: all ranks write one model"),
        ({"dtype": torch.bfloat16}, "got dtype=None on rank 0 and torch.bfloat16 on rank 1"),
        ({"max_shard_bytes": 0}, "a was not saved: rank 1: max_shard_bytes=0: must be"),
    ]

    def work():
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        with pl.Pipeline(pl.from_pretrained(tmp_path / "home"), schedule, mesh=pl.Mesh(pp=2)) as pipe:
            for own, words in cases:
                with pytest.raises(InputError, match=words) as told:
                    pipe.save_pretrained(**{"directory": tmp_path / "a", **(own if pipe.rank else {})})
                assert "\n" not in str(told.value)

    pl.run_threads(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_processes_name_one_directory_in_other_words(tmp_path):
    def work():
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        with pl.Pipeline(transformers.LlamaForCausalLM(config("llama")), schedule, mesh=pl.Mesh(pp=2)) as pipe:
            pipe.save_pretrained(os.path.relpath(tmp_path / "a") if pipe.rank else tmp_path / "a")

    pl.run_threads(2, work)
    assert (tmp_path / "a" / "config.json").exists()


def test_a_failure_on_one_process_is_an_error_on_all(tmp_path, monkeypatch):
    """Here of the second, whose disk is full; nothing is left behind."""
    from pipeloom.common import tensor_file

    transformers.LlamaForCausalLM(config("llama")).save_pretrained(tmp_path / "home")
    real, number = tensor_file.os.pwrite, [0]

    def pwrite(file, data, offset):
        number[0] += 1
        if number[0] == 20:
            raise OSError(28, "No space left on device")
        return real(file, data, offset)

    def work():
        model = pl.from_pretrained(tmp_path / "home")
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        pipe = pl.Pipeline(model, schedule, mesh=pl.Mesh(pp=2, dp=2), data="zero2")
        with pipe, pytest.raises(CheckpointError, match=r"was not saved: rank \d: .*No space left"):
            pipe.save_pretrained(tmp_path / "out")

    monkeypatch.setattr(tensor_file.os, "pwrite", pwrite)
    pl.run_threads(4, work)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def within_a_limit(rank, home, loads_all):
    """Load one of four stages, or the whole model, under the limit that a stage and one tensor need.

    Returns:
        The bytes that this process holds, those that the limit leaves, and the sum over the parameters or the error.
    """
    model = pl.from_pretrained(home)
    stages = pl.split.split(model, 4)
    sizes = [sum(p.nbytes for p in module.parameters()) for module in stages.modules]
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    room = max(sizes) + max(p.nbytes for p in model.parameters()) + (24 << 20)
    limit = int(lines["VmData"].split()[0]) * 1024 + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if loads_all:
        with pytest.raises(InputError) as told:
            load_weights(model)
        return sum(sizes), room, str(told.value)
    with pl.Pipeline(stages, pl.schedules.build("1f1b", num_ranks=4, num_microbatches=4)) as pipe:
        return sizes[rank], room, sum(float(p.sum()) for p in pipe.parameters())


def test_a_process_has_memory_for_its_stages_and_one_tensor(tmp_path):
    """Four processes load a stage each; under the same limit a process that loads the model fails."""
    sizes = {**LLAMA, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    sizes |= {"num_hidden_layers": 8, "vocab_size": 4096}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model.save_pretrained(tmp_path)
    whole = sum(p.nbytes for p in model.parameters())
    found = run_ranks(within_a_limit, 4, tmp_path, False)
    [(all_bytes, room, told)] = run_ranks(within_a_limit, 1, tmp_path, True)
    assert sum(own for own, _, _ in found) == all_bytes == whole
    assert {room for _, room, _ in found} == {room}
    assert room < whole * 0.7, (whole, found)
    assert sum(total for _, _, total in found) == whole / 4
    assert re.search(r"^'[\w.]+' of shape \[.* MiB\): there is no memory for it on cpu.*, here [\d.]+ MiB, and", told)
    assert "\n" not in told
