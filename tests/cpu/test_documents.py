"""Documents of JSON lines: what is scored, that each comes once, and that packed ones count as they do alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import pipeloom as pl
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.shards import Shard
from pipeloom.errors import DataError, InputError
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.data.packing import pack
from pipeloom.transport.values import MicroBatches
from tests.cpu.fine_tuning import MARKED, TEMPLATE, byte_tokenizer, records, save_llama, write_lines

CHAT = [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * 2, "abcd", strict=True)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_llama(directory)
    return directory


def with_template(directory: Path, template: str | None) -> PretrainedTokenizer:
    byte_tokenizer(template).save_pretrained(directory)
    return PretrainedTokenizer(directory)


def prepared(lines: list, llama: Path, tmp_path: Path, fraction: float = 0.0):
    file, tokenizer = write_lines(tmp_path / "a.jsonl", lines), PretrainedTokenizer(llama)
    return *prepare_documents(
        [Shard.of(file, tmp_path)], str(tmp_path), tokenizer, tmp_path / "cache", fraction
    ), tokenizer


def scored_texts(made: Documents, number: int) -> list[tuple[str, str]]:
    """Of each sample, its text and the text of its labels."""
    found = []
    for index in range(number):
        inputs, targets = made.batch([index], 1)
        labels = targets[0]["labels"][0]
        ids = inputs[0]["input_ids"][0][: int(inputs[0]["attention_mask"].sum())]
        found.append((made.tokenizer.decode(ids.tolist()), made.tokenizer.decode(labels[labels != -100].tolist())))
    return found


def test_each_kind_of_record_scores_its_answers(llama: Path, tmp_path: Path) -> None:
    lines = [{"text": "text"}, {"prompt": "p ", "completion": "c", "id": 7}, {"messages": CHAT}]
    made = Documents(*prepared(lines, llama, tmp_path), 64, packing=False)
    assert scored_texts(made, 3) == [
        ("text</s>", "ext</s>"),  # nothing predicts a first token
        ("p c</s>", "c</s>"),
        ("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>", "b<|end|>d<|end|>"),
    ]


def test_marks_of_a_template_and_prefixes_score_alike(tmp_path: Path) -> None:
    marked, plain = (with_template(tmp_path / str(k), t) for k, t in enumerate((MARKED, TEMPLATE)))
    assert marked.conversation(CHAT) == plain.conversation(CHAT)
    ids, scored = plain.conversation(CHAT)
    assert plain.decode([token for token, counts in zip(ids, scored, strict=True) if counts]) == "b<|end|>d<|end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}", "Mark the assistant's turns"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_templates_that_cannot_be_scored_are_told(tmp_path: Path, template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        with_template(tmp_path, template).conversation(CHAT)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "\udcff"}', "line 2 is not UTF-8 text"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"prompt": "a"}', "line 2 has prompt: must have either text"),
        ('{"text": "a", "messages": []}', "line 2 has text, messages"),
        ('{"text": 3}', "text is a int"),
        ('{"messages": [{"content": "a"}]}', "objects with role and content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no turn of the role assistant"),
        ('{"prompt": "a", "completion": null}', "line 2: completion is null, and must be a string"),
        ('{"messages": [{"role": "assistant", "content": null}]}', r"content of message 1 \(assistant\) is null"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2: content of message 1 \(user\) is a int"),
        ('{"messages": [{"role": "assistant", "content": null, "tool_calls": [1]}]}', "line 2: .*does not render"),
    ],
)
def test_a_wrong_line_is_named(llama: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n{line}\n', errors="surrogateescape")
    with pytest.raises(DataError, match=message) as raised:
        prepare_documents(
            [Shard.of(file, tmp_path)], str(tmp_path), PretrainedTokenizer(llama), tmp_path / "cache", 0.0
        )
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").glob("corpus-*"))


@pytest.mark.parametrize("packing", [False, True])
def test_every_document_comes_once_and_validation_keeps_its_own(llama: Path, tmp_path: Path, packing: bool) -> None:
    numbers, facts, tokenizer = prepared(records(60), llama, tmp_path, 0.2)
    made = Documents(numbers, facts, tokenizer, 96, packing=packing)
    assert not made.notices
    lines = [json.dumps(line) for line in records(60)]
    found = {"train": 0, "validation": 0}
    for part in found:
        every = range(made.num_samples(part))
        inputs, targets = made.batch(every, 3, part)
        tokens = sum(int((each["labels"][:, 1:] != -100).sum()) for each in targets)
        assert tokens == made.num_labels(every, part)
        if not packing:
            assert sum(int(each["attention_mask"].sum()) for each in inputs) == made.num_tokens(every, part)
            longest = [each["input_ids"].shape[1] for each in inputs]
            assert len(set(longest)) > 1
        found[part] = made.num_tokens(every, part)
    assert sum(found.values()) == len(numbers) - len(lines)
    again = prepare_documents(
        [Shard.of(tmp_path / "a.jsonl", tmp_path)], str(tmp_path), tokenizer, tmp_path / "cache", 0.2
    )
    assert np.array_equal(again[0], numbers)


def test_long_documents_are_divided_or_cut_off(llama: Path, tmp_path: Path) -> None:
    lines = [{"text": "x" * 20}, {"prompt": "p" * 6, "completion": "c" * 6}, {"prompt": "p" * 9, "completion": "c"}]
    made = Documents(*prepared(lines, llama, tmp_path), 8, packing=False)
    assert [text for text, _ in scored_texts(made, made.num_samples())] == ["x" * 8, "x" * 8, "xxxx</s>", "ppppppcc"]
    assert made.notices == [
        "1 of 3 documents have more than 8 tokens: divided",
        "2 of 3 documents have more than 8 tokens: cut off",
        "1 documents have no scored token within 8 tokens: left out",
    ]


@given(st.lists(st.integers(1, 30), max_size=60))
def test_packing_keeps_every_document_within_the_capacity(lengths: list[int]) -> None:
    packs = pack(lengths, 30)
    assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
    rooms = [30 - sum(lengths[index] for index in each) for each in packs]
    assert all(room >= 0 for room in rooms)
    assert sum(room >= 15 for room in rooms) <= 1  # two that are half empty would have been one


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_the_loss_that_they_have_alone(llama: Path, tmp_path: Path, attention: str) -> None:
    prepared_files = prepared(records(20), llama, tmp_path)
    model = LlamaForCausalLM.from_pretrained(llama, attn_implementation=attention).eval()
    losses = []
    with torch.no_grad():
        for packing in (False, True):
            made = Documents(*prepared_files, 128, packing=packing)
            every = range(made.num_samples())
            number = made.num_labels(every)
            inputs, targets = made.batch(every, len(every) if not packing else 1)
            losses.append(
                sum(
                    float(model(**given, **labels, num_items_in_batch=number, use_cache=False).loss)
                    for given, labels in zip(inputs, targets, strict=True)
                )
            )
    assert len(made.batch(every, 1)[0][0]["input_ids"]) < 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_batch_may_be_cut_already(llama: Path, tmp_path: Path) -> None:
    """Micro-batches of different lengths have the loss and the gradients of one padded batch."""
    made = Documents(*prepared(records(9), llama, tmp_path), 64, packing=False)
    inputs, targets = made.batch(range(9), 4)
    whole, labels = (each[0] for each in made.batch(range(9), 1))
    found = []
    for batch in ((inputs, targets), (whole, labels)):
        model = LlamaForCausalLM.from_pretrained(llama).double()
        with pl.Pipeline(model, pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)) as pipe:
            loss = pipe.step(*batch)
            found.append((loss, {name: p.grad for name, p in pipe.named_parameters()}))
            joined = MicroBatches({**a, **b} for a, b in zip(inputs, targets, strict=True))
            assert torch.equal(
                pipe.evaluate(*batch), pipe.evaluate(joined if batch[0] is inputs else {**whole, **labels})
            )
            with pytest.raises(InputError, match="cut into 3 micro-batches: the schedule has 4"):
                pipe.step(MicroBatches(inputs[:3]), MicroBatches(targets[:3]))
    (loss, gradients), (expected, others) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # Llama computes norms in float32
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-5, atol=1e-7)
