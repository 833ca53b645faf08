"""`pipeloom train --model.pretrained`: the numbers of one process on its own, files that transformers and peft load,
runs that go on to the last bit, and what is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

import pipeloom as pl
from pipeloom.cli import checkpoint, main
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.sampler import Sampler
from pipeloom.data.shards import Shard
from pipeloom.errors import SplitError
from pipeloom.train import checkpoint as ck
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.fine_tuning import model as fine_tuning_model
from pipeloom.train.optimizers import learning_rate
from tests.cpu.fine_tuning import byte_tokenizer, records, save_llama, write_lines

from .train_runs import story

STEPS, BATCH = 4, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and documents."""
    directory = tmp_path_factory.mktemp("tuned")
    save_llama(directory / "llama")
    write_lines(directory / "a.jsonl", records(60))
    return directory


def words(home: Path, out: Path, *more: str) -> list[str]:
    base = {
        "model.pretrained": home / "llama", "data.path": home / "a.jsonl", "output_dir": out, "steps": STEPS,
        "data.validation_fraction": 0.2, "save_steps": 2, "eval_steps": 2, "eval_batches": 2, "sample_tokens": 3,
        "batch.size": BATCH, "batch.microbatches": 2, "optimizer.warmup_steps": 1, "optimizer.learning_rate": 0.01,
        "save_total_limit": "null",
    }  # fmt: skip
    return ["train", "--local", *(f"--{key}={value}" for key, value in base.items()), *more]


def tuned(home: Path, out: Path, *more: str) -> Path:
    assert main(words(home, out, *more)) == 0
    return out


def refusal(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(words(home, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    return error


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24)[None], use_cache=False).logits
    return found


@pytest.fixture(scope="module")
def padded(home: Path) -> Path:
    return tuned(home, home / "padded")


def one_process(home: Path, out: Path, *, packing: bool) -> list[float]:
    """The losses of plain accumulation over each step's documents, one after another."""
    tokenizer = PretrainedTokenizer(home / "llama")
    numbers, facts = prepare_documents([Shard.of(home / "a.jsonl", home)], str(home), tokenizer, out / "data", 0.2)
    documents = Documents(numbers, facts, tokenizer, 128, packing=packing)
    sampler = Sampler(documents.num_samples(), 0)
    model = LlamaForCausalLM.from_pretrained(home / "llama", dtype=torch.float32).train()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    settings = OptimizerConfig(learning_rate=0.01, warmup_steps=1)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        chosen = sampler.batch(step * BATCH, BATCH)
        total, number = 0.0, documents.num_labels(chosen)
        optimizer.zero_grad()
        for inputs, labels in zip(*documents.batch(chosen, BATCH), strict=True):
            loss = model(**inputs, **labels, num_items_in_batch=number, use_cache=False).loss
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, settings)
        optimizer.step()
        losses.append(total)
    return losses


def validation_loss(home: Path, out: Path, model: Any) -> float:
    """The loss of the validation documents that a run evaluates, each on its own."""
    tokenizer = PretrainedTokenizer(home / "llama")
    numbers, facts = prepare_documents([Shard.of(home / "a.jsonl", home)], str(home), tokenizer, out / "data", 0.2)
    documents = Documents(numbers, facts, tokenizer, 128, packing=False)
    chosen = [index for batch in documents.validation_batches(BATCH, 2) for index in batch]
    inputs, labels = documents.batch(chosen, len(chosen), "validation")
    number = documents.num_labels(chosen, "validation")
    with torch.no_grad():
        return sum(
            float(model.eval()(**each, **target, num_items_in_batch=number, use_cache=False).loss)
            for each, target in zip(inputs, labels, strict=True)
        )


def step_losses(out: Path) -> list[float]:
    return [row[1] for row in story(out) if row[1] is not None]


@pytest.mark.parametrize("packing", [False, True])
def test_losses_are_those_of_one_process(home: Path, padded: Path, tmp_path: Path, packing: bool) -> None:
    out = tuned(home, tmp_path / "out", "--data.packing", "true", "--schedule", "zb-h1") if packing else padded
    assert step_losses(out) == pytest.approx(one_process(home, tmp_path, packing=packing), rel=2e-6)


@pytest.mark.parametrize(
    "more",
    [
        "--parallel.data 2 --parallel.data_strategy zero3 --schedule interleaved --batch.microbatches 2",
        pytest.param(
            "--parallel.pipeline 1 --parallel.data 3 --parallel.data_strategy zero1 --memory.recompute full",
            marks=pytest.mark.whole_grid,
        ),
        "--parallel.tensor 2",
        pytest.param(
            "--parallel.pipeline 4 --parallel.cut 1,1,1,1 --schedule gpipe --memory.recompute selective",
            marks=pytest.mark.whole_grid,
        ),
        "--schedule zb-v --parallel.chunks 2 --optimizer.barrier false",
    ],
)
def test_every_layout_trains_alike(home: Path, padded: Path, tmp_path: Path, more: str) -> None:
    out = tuned(home, tmp_path, "--save_steps", "0", *more.split())
    expected, found = story(padded), story(out)
    for column in (1, 4):
        pairs = [(a[column], b[column]) for a, b in zip(expected, found, strict=True) if a[column] is not None]
        assert [b for _, b in pairs] == pytest.approx([a for a, _ in pairs], rel=1e-5)
    saved, others = (AutoModelForCausalLM.from_pretrained(each / "model") for each in (padded, out))
    torch.testing.assert_close(logits(others), logits(saved), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("more", [(), ("--model.lora=2",)])
def test_a_checkpoint_is_converted_to_a_plan(home: Path, padded: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    saved = tuned(home, tmp_path / "adapters", *more, "--steps=2", "--eval_steps=0") if more else padded
    plan = tmp_path / "plan.json"
    pl.Plan(schedule="1f1b", pipeline=2, microbatches=2, data=2, data_strategy="zero2").save(plan)
    assert checkpoint.main(["convert", str(saved), str(tmp_path / "out"), "--plan", str(plan)]) == 0
    before, after = ck.load(saved), ck.load(tmp_path / "out")
    assert after.num_parts == 4
    assert sorted(before.names) == sorted(after.names)
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names)


def test_the_directory_at_the_end_and_a_converted_checkpoint_are_loaded(home: Path, padded: Path) -> None:
    assert main(["checkpoint", "convert", str(padded), str(home / "converted")]) == 0
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (padded / "model", home / "converted")]
    assert torch.equal(logits(models[0]), logits(models[1]))
    assert validation_loss(home, padded, models[0]) == pytest.approx(story(padded)[-1][4], rel=1e-6)
    assert not torch.allclose(logits(models[0]), logits(AutoModelForCausalLM.from_pretrained(home / "llama")))
    ids = [AutoTokenizer.from_pretrained(each)("a b").input_ids for each in (padded / "model", home / "converted")]
    assert ids[0] == ids[1] == AutoTokenizer.from_pretrained(home / "llama")("a b").input_ids
    assert yaml.safe_load((padded / "config.yaml").read_text())["model"]["sequence_length"] == 128


@pytest.mark.parametrize("more", [[], ["--model.lora=2"]], ids=["whole", "lora"])
def test_a_run_goes_on_to_the_last_bit(home: Path, padded: Path, tmp_path: Path, more: list[str]) -> None:
    if more:
        pytest.importorskip("peft", reason="peft is not installed (the extra 'lora')")
    whole = tuned(home, tmp_path / "whole", *more) if more else padded
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoint-4", "model"))
    assert main([*words(home, out, *more), "--resume_from_checkpoint=latest"]) == 0
    assert story(out) == story(whole)
    names = ["adapter_model.safetensors"] if more else ["model.safetensors", "config.json"]
    for name in names:
        assert (out / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


def test_adapters_are_trained_and_saved_as_peft_does(home: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (the extra 'lora')")
    more = ["--model.lora=2", "--model.lora_targets=q_proj,up_proj", "--schedule=interleaved"]
    found = {}
    for name, layout in (("one", []), ("zero", ["--parallel.data=2", "--parallel.data_strategy=zero3"])):
        out = tuned(home, tmp_path / name, *more, *layout)
        assert main(["checkpoint", "convert", str(out), str(tmp_path / f"{name}-converted")]) == 0
        for directory in (out / "model", tmp_path / f"{name}-converted"):
            base = AutoModelForCausalLM.from_pretrained(home / "llama")
            before = logits(base)
            adapted = peft.PeftModel.from_pretrained(base, directory)
            found[directory] = logits(adapted)
            assert validation_loss(home, out, adapted) == pytest.approx(story(out)[-1][4], rel=1e-6)
            assert not torch.equal(found[directory], before)
        manifest = json.loads((out / "checkpoint-4" / "manifest.json").read_text())
        assert manifest["state"]["model"]["adapters"]["target_modules"] == ["q_proj", "up_proj"]
        index = json.loads((out / "checkpoint-4" / "model.safetensors.index.json").read_text())["weight_map"]
        assert all("lora_" in key for key in index)
    first, *others = found.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[tmp_path / "one" / "model"], found[tmp_path / "one-converted"])


def test_text_is_cut_into_windows(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the loom weaves " * 300)
    more = [f"--data.path={tmp_path / 'a.txt'}", "--model.sequence_length=32", "--precision.dtype=bf16"]
    losses = step_losses(tuned(home, tmp_path / "out", *more))
    wide = step_losses(tuned(home, tmp_path / "wide", *more, "--precision.dtype=fp32"))
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(wide, rel=1e-2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--model.layers=3", "model.layers=3: has no effect with model.pretrained="),
        ("--model.sequence_length=129", "has 128 positions. Use 128 or less"),
        ("--parallel.pipeline=5", "has 4 blocks, schedule '1f1b' has 5 stages"),
        ("--parallel.cut=2,1", "has 2 stages with 3 blocks; the run has 2 stages and 4 blocks"),
        ("--parallel.slices=2", "parallel.slices=2: does not work with model.pretrained="),
        ("--parallel.context=2", "parallel.context=2: does not work with model.pretrained="),
        ("--parallel.tensor=4 --parallel.tensor_layout=2d", "parallel.tensor_layout=2d: does not work"),
        ("--parallel.tensor=2 --parallel.sequence=true", "parallel.sequence=true: does not work with"),
        ("--parallel.expert=2 --parallel.data=2", "parallel.expert=2: does not work with model.pretrained"),
        ("--parallel.tensor=3", "model.heads=4: must be a multiple of 3"),
        ("--parallel.cut=time", "parallel.cut=time: does not work"),
        ("--schedule=pipedream", "schedule=pipedream: does not work with model.pretrained="),
        ("--memory.cap=1GiB", "memory is predicted for pipeloom's GPT alone"),
        ("--model.lora_targets=q_proj", "model.lora_targets=q_proj: has no effect without model.lora"),
        ("--model.lora=0", "model.lora=0: must be at least 1"),
        ("--model.pretrained=/nowhere", "model.pretrained=/nowhere: is not a directory"),
    ],
)
def test_what_does_not_fit_is_one_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, message: str
) -> None:
    assert message in refusal(home, tmp_path, capsys, *more.split())


def test_other_mistakes_are_one_line(
    home: Path, padded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text " * 400)
    more = [f"--data.path={tmp_path / 'a.txt'}", "--data.packing=true"]
    assert "data.packing=true: has no effect on text" in refusal(home, tmp_path, capsys, *more)
    both = tmp_path / "both"
    both.mkdir()
    (both / "a.txt").write_text("text")
    shutil.copy(home / "a.jsonl", both)
    assert "has 1 .jsonl files and others, such as a.txt" in refusal(home, tmp_path, capsys, f"--data.path={both}")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "text"}] * 200))
    assert "a.json is a JSON array of records" in refusal(home, tmp_path, capsys, f"--data.path={tmp_path / 'a.json'}")
    assert main(["train", "--local", "--data.packing=true", f"--output_dir={tmp_path / 'gpt'}"]) == 2
    assert "data.packing=true: has no effect with a new GPT" in capsys.readouterr().err
    other = tmp_path / "other"
    save_llama(other, num_hidden_layers=2)
    capsys.readouterr()
    more = [f"--model.pretrained={other}", f"--resume_from_checkpoint={padded / 'checkpoint-2'}"]
    assert "num_hidden_layers=2, and checkpoint" in refusal(home, tmp_path, capsys, *more)


def test_a_directory_of_another_kind_of_model_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes a decoder of an encoder-decoder, without its encoder and with a new head."""
    other, tokenizer = tmp_path / "other", byte_tokenizer()
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = PegasusConfig(vocab_size=len(tokenizer), d_model=8, max_position_embeddings=128, **sizes)
    PegasusForConditionalGeneration(config).save_pretrained(other)
    tokenizer.save_pretrained(other)
    capsys.readouterr()
    found = refusal(home, tmp_path, capsys, f"--model.pretrained={other}")
    assert "holds a PegasusForConditionalGeneration, of which a PegasusForCausalLM would be another model" in found


def test_a_model_that_only_python_can_cut(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise SplitError("LlamaForCausalLM has no list of blocks. Pass example=(args, kwargs).")

    monkeypatch.setattr(fine_tuning_model, "split", refused)
    found = refusal(home, tmp_path, capsys)
    assert "LlamaForCausalLM" in found
    assert found.endswith("Options cannot: train the model from Python, with pipeloom.Pipeline.\n")


def test_a_model_that_mixes_packed_documents_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.masking_utils

    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    assert "does not keep packed documents apart" in refusal(home, tmp_path, capsys, "--data.packing=true")
