"""Checkpoints become Hugging Face directories, and Hugging Face directories are read as checkpoints."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import transformers

import pipeloom as pl
from pipeloom.cli import checkpoint as cli
from pipeloom.errors import CheckpointError, InputError
from pipeloom.train import checkpoint as ck
from tests.cpu.test_pretrained import assert_equal, config, tensors
from tests.cpu.test_save_pretrained import Tokenizer, written_names


def made(name, kind, **changes):
    torch.manual_seed(1)
    return getattr(transformers, name)(config(kind, **changes))


@pytest.mark.parametrize(
    ("name", "kind", "changes", "options"),
    [
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}, []),
        ("MixtralForCausalLM", "mixtral", {"num_local_experts": 4}, ["--ranks", "3"]),
    ],
)
def test_transformers_reads_a_converted_checkpoint(tmp_path, name, kind, changes, options):
    model = made(name, kind, **changes)
    home, out = tmp_path / "home", tmp_path / "out"
    model.save_pretrained(home)
    Tokenizer().save_pretrained(home)
    saved = ck.save(tmp_path / "run", 3, model=model.state_dict())
    assert cli.main(["convert", str(saved), str(out), "--config", str(home), *options]) == 0
    read = type(model).from_pretrained(out)
    assert_equal(tensors(read), tensors(model))
    assert written_names(out) == written_names(home)
    assert len(list(out.glob("*.safetensors"))) == (3 if options else 1)
    assert (out / "tokenizer.json").is_file()
    elsewhere = tmp_path / "other" / "config.json"
    for other, words in (
        (config(kind, **changes, num_hidden_layers=5), r"has no tensor model\.layers\.4\."),
        (config(kind, **changes, num_hidden_layers=3), r"has no tensor model\.layers\.3\."),
        (config(kind, **changes, vocab_size=65), r"has shape \[64, 32\] in .* and \[65, 32\]"),
    ):
        other.architectures = [name]
        other.save_pretrained(elsewhere.parent)
        with pytest.raises(CheckpointError, match=words):
            cli.main(
                ["convert", str(saved), str(tmp_path / "none"), "--config", str(tmp_path / "other" / "config.json")]
            )
    with pytest.raises(InputError, match="not an empty directory"):
        cli.main(["convert", str(saved), str(out), "--config", str(home)])
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_may_have_its_configuration(tmp_path):
    model = made("LlamaForCausalLM", "llama")
    model.save_pretrained(tmp_path / "home")
    others = {"config.json": (tmp_path / "home" / "config.json").read_bytes(), "tokenizer.json": b"{}"}
    saved = ck.save(tmp_path / "run", 3, model=model.state_dict(), others=others)
    ck.verify(saved)
    with pytest.raises(InputError, match="is a checkpoint of pipeloom"):
        pl.from_pretrained(saved)
    shutil.rmtree(tmp_path / "home")
    assert cli.main(["convert", str(saved), str(tmp_path / "out")]) == 0
    assert_equal(tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), tensors(model))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    (saved / "tokenizer.json").write_text("{ }")
    with pytest.raises(CheckpointError, match="is damaged"):
        cli.main(["convert", str(saved), str(tmp_path / "again")])


@pytest.mark.parametrize(
    ("written", "read", "kind", "changes"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("GPT2Model", "GPT2Model", "gpt2", {}),
        ("MixtralForCausalLM", "MixtralForCausalLM", "mixtral", {"num_local_experts": 4}),
    ],
)
def test_a_hugging_face_directory_is_read_as_a_checkpoint(tmp_path, written, read, kind, changes):
    model, other = made(written, kind, **changes), getattr(transformers, read)(config(kind, **changes))
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    saved = ck.load(tmp_path)
    assert (saved.step, saved.optimizer_state()) == (0, None)
    values = {name: value for name, value in other.state_dict().items() if "mlp.experts" not in name}
    saved.load_model(values)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    if kind == "mixtral":
        with pytest.raises(CheckpointError, match=r"in several parts.*from_pretrained"):
            saved.load_model(other.state_dict())
    with pytest.raises(CheckpointError, match=r"has no tensor nothing"):
        saved.tensor("nothing")
